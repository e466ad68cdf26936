/* The environment variables sooth reads, all of them; no other file calls getenv.
 *
 *   NO_COLOR         any value but the empty one: no colour, ever
 *   XDG_CACHE_HOME   where pulled models lie (sooth/models under it) and what passes took is kept
 *                    (sooth/costs); default ~/.cache
 *   XDG_STATE_HOME   where the history of `chat` is kept (sooth/chat_history); default:
 *                    ~/.local/state
 *   XDG_DATA_HOME    where drafts may lie that the user trained (sooth/models under it); default:
 *                    ~/.local/share
 *   SOOTH_MODELS     a folder of NAME.gguf files, looked at before the cache
 *   SOOTH_DEBUG      mutant=NAME: be wrong on purpose (base/mutant.h); only in the test program
 *                    sooth-mutants, ignored by every other
 *   SOOTH_NO_PIN     any value but the empty one: threads are not bound to cores
 *   SOOTH_PYTHON     the Python that runs pip for `pull`; default python3
 *   SOOTH_API_KEY    the key that `serve` asks for, where --api-key gives none
 *   NOTIFY_SOCKET    where a service manager hears that `serve` is ready */
#ifndef SO_BASE_ENV_H
#define SO_BASE_ENV_H

#include <stdbool.h>

bool so_env_no_color(void);
bool so_env_no_pin(void);
/* The folder for cached files, without a trailing slash; NULL where neither XDG_CACHE_HOME nor
 * HOME is set. Caller frees. */
char *so_env_cache_dir(void);
/* The folder for what is kept between runs and is nobody else's business, likewise. */
char *so_env_state_dir(void);
/* The folder for what the user put there, likewise. */
char *so_env_data_dir(void);
/* NULL where unset or empty; belongs to the environment. */
const char *so_env_models_dir(void);
const char *so_env_python(void);        /* never NULL */
const char *so_env_api_key(void);       /* NULL where unset or empty */
const char *so_env_notify_socket(void); /* the same */
#ifdef SO_MUTANTS
/* NAME of SOOTH_DEBUG=mutant=NAME, or NULL; belongs to the environment. */
const char *so_env_mutant(void);
#endif

#endif
