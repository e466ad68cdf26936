/* What the operating system grants this process: memory it could still take, and the control groups
 * it lies in. */
#ifndef SO_BASE_CGROUP_H
#define SO_BASE_CGROUP_H

#include <stddef.h>

/* Calls fn with the folder of this process' control group (version 2) and of every one above it;
 * not at all where there is none. */
void so_cgroup_walk(void (*fn)(void *arg, const char *dir), void *arg);

/* Bytes that may still be allocated without swapping or being killed: free and reclaimable memory
 * of the machine, the limits of control groups and the address space limit considered. SIZE_MAX
 * where nothing can be found out. */
size_t so_mem_available(void);

#endif
