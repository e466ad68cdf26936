/* Reads environment variables for env.h. An empty variable counts as unset, as the XDG base
 * directory specification requires. */
#include "base/env.h"

#include <stdlib.h>
#include <string.h>

#include "base/file.h"

static const char *lookup(const char *name) {
    const char *v = getenv(name);
    return v && *v ? v : NULL;
}

bool so_env_no_color(void) { return lookup("NO_COLOR") != NULL; }
bool so_env_dumb_terminal(void) {
    const char *term = lookup("TERM");
    return !term || strcmp(term, "dumb") == 0;
}
bool so_env_no_pin(void) { return lookup("SOOTH_NO_PIN") != NULL; }

static char *xdg_dir(const char *variable, const char *in_home) {
    const char *xdg = lookup(variable), *home = lookup("HOME");
    if (xdg)
        return so_path_join(xdg, "sooth");
    return home ? so_path_join(home, in_home) : NULL;
}

char *so_env_cache_dir(void) { return xdg_dir("XDG_CACHE_HOME", ".cache/sooth"); }
char *so_env_state_dir(void) { return xdg_dir("XDG_STATE_HOME", ".local/state/sooth"); }

char *so_env_data_dir(void) { return xdg_dir("XDG_DATA_HOME", ".local/share/sooth"); }

const char *so_env_models_dir(void) { return lookup("SOOTH_MODELS"); }

const char *so_env_python(void) {
    const char *v = lookup("SOOTH_PYTHON");
    return v ? v : "python3";
}

const char *so_env_api_key(void) { return lookup("SOOTH_API_KEY"); }
const char *so_env_notify_socket(void) { return lookup("NOTIFY_SOCKET"); }

#ifdef SO_MUTANTS
const char *so_env_mutant(void) {
    static const char key[] = "mutant=";
    const char *v = lookup("SOOTH_DEBUG");
    return v && strncmp(v, key, sizeof key - 1) == 0 ? v + sizeof key - 1 : NULL;
}
#endif
