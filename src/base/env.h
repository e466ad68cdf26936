/* All environment variables that sooth reads; only env.c calls getenv (checked by `make lint`).
 * A variable set to the empty string counts as unset.
 *
 *   NO_COLOR         any value: never print colours
 *   TERM             dumb or unset: no control sequences, so no colour and no progress bar
 *   XDG_CACHE_HOME   base of the cache directory: pulled models (sooth/models), measured costs and
 *                    records of drafters (sooth/costs); default ~/.cache
 *   XDG_STATE_HOME   base of the state directory: history of `chat` (sooth/chat_history); default
 *                    ~/.local/state
 *   XDG_DATA_HOME    base of the data directory: drafts trained by the user (sooth/models);
 *                    default ~/.local/share
 *   SOOTH_MODELS     a folder of NAME.gguf files, searched before the cache
 *   SOOTH_DEBUG      mutant=NAME: enable one deliberate fault (base/mutant.h); read only by the
 *                    test program sooth-mutants
 *   SOOTH_NO_PIN     any value: do not bind threads to cores
 *   SOOTH_PYTHON     the Python that runs pip for `pull`; default python3
 *   SOOTH_API_KEY    the key that clients of `serve` must send, if --api-key is not given
 *   NOTIFY_SOCKET    the socket on which `serve` and `draft-worker` report to systemd that they
 *                    are ready */
#ifndef SO_BASE_ENV_H
#define SO_BASE_ENV_H

#include <stdbool.h>

bool so_env_no_color(void);
bool so_env_dumb_terminal(void); /* TERM is unset, empty or "dumb" */
bool so_env_no_pin(void);
/* sooth's folders below XDG_CACHE_HOME, XDG_STATE_HOME and XDG_DATA_HOME, without a trailing slash.
 * NULL if neither the variable nor HOME is set. Caller frees. */
char *so_env_cache_dir(void);
char *so_env_state_dir(void);
char *so_env_data_dir(void);
/* These return NULL if the variable is unset, except so_env_python. Do not free the result. */
const char *so_env_models_dir(void);
const char *so_env_python(void); /* never NULL */
const char *so_env_api_key(void);
const char *so_env_notify_socket(void);
#ifdef SO_MUTANTS
/* NAME of SOOTH_DEBUG=mutant=NAME, or NULL. Do not free the result. */
const char *so_env_mutant(void);
#endif

#endif
