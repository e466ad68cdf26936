/* How much memory this process may use, and its control groups. */
#ifndef SO_BASE_CGROUP_H
#define SO_BASE_CGROUP_H

#include <stddef.h>

/* Calls fn with the directory of this process's control group (cgroup v2), then with each parent
 * up to the root. Does not call it on systems without cgroup v2. */
void so_cgroup_walk(void (*fn)(void *arg, const char *dir), void *arg);

/* A hint: the bytes that can probably be allocated without swapping or an out-of-memory kill. The
 * minimum of the machine's available memory, of what each control group limit leaves (limit − used
 * + file cache) and of what RLIMIT_AS leaves (limit − address space in use). SIZE_MAX if none of
 * them can be read. */
size_t so_mem_available(void);

#endif
