/* Limits that the operating system sets for this process: available memory and control groups. */
#ifndef SO_BASE_CGROUP_H
#define SO_BASE_CGROUP_H

#include <stddef.h>

/* Calls fn with the directory of this process's control group (cgroup v2), then with each parent
 * up to the root. Does not call it on systems without cgroup v2. */
void so_cgroup_walk(void (*fn)(void *arg, const char *dir), void *arg);

/* Bytes that can be allocated without swapping or an out-of-memory kill: the minimum of the
 * machine's available memory, the control group limits and RLIMIT_AS. SIZE_MAX if none of them can
 * be read. */
size_t so_mem_available(void);

#endif
