/* Limits that the kernel reports in /proc and /sys/fs/cgroup.
 *
 * The numbers are hints. A missing or unreadable file means "no limit known", and callers use the
 * results only for decisions that stay correct when a number is wrong. Any thread. */
#include "base/cgroup.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/mem.h"

void so_cgroup_walk(void (*fn)(void *arg, const char *dir), void *arg) {
    FILE *f = fopen("/proc/self/cgroup", "re");
    if (!f)
        return;
    char line[1024], dir[1200];
    while (fgets(line, sizeof line, f)) {
        if (strncmp(line, "0::/", 4) != 0)
            continue;
        char *group = line + 3;
        group[strcspn(group, "\n")] = 0;
        for (char *slash; (slash = strrchr(group, '/')) != NULL; *slash = 0) {
            snprintf(dir, sizeof dir, "/sys/fs/cgroup%s", group);
            fn(arg, dir);
        }
        fn(arg, "/sys/fs/cgroup");
    }
    fclose(f);
}

/* The number that follows `key` in dir/name; key "" reads a file that holds a single number.
 * Returns −1 if there is no such number (for instance "max"). */
static int64_t read_number(const char *dir, const char *name, const char *key) {
    char path[1300], line[256];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "re");
    int64_t value = -1;
    size_t len = strlen(key);
    if (!f)
        return -1;
    while (value < 0 && fgets(line, sizeof line, f)) {
        long long v;
        if (strncmp(line, key, len) == 0 && sscanf(line + len, " %lld", &v) == 1 && v >= 0)
            value = v;
    }
    fclose(f);
    return value;
}

static void take_min(size_t *least, int64_t bytes) {
    size_t v = bytes < 0 ? 0 : (size_t)bytes;
    *least = SO_MIN(*least, v);
}

/* Lowers *arg to the memory that a cgroup still has available: its limit, minus what it uses, plus
 * cached file pages, which memory.current includes although the kernel reclaims them on demand. */
static void limit_to_group(void *arg, const char *dir) {
    int64_t max = read_number(dir, "memory.max", ""), used = read_number(dir, "memory.current", "");
    if (max < 0 || used < 0)
        return;
    int64_t cached = read_number(dir, "memory.stat", "file ");
    take_min(arg, max - used + SO_MAX(cached, (int64_t)0));
}

size_t so_mem_available(void) {
    size_t least = SIZE_MAX;
    int64_t free_kb = read_number("/proc", "meminfo", "MemAvailable:");
    if (free_kb >= 0)
        take_min(&least, free_kb * 1024);
    so_cgroup_walk(limit_to_group, &least);
    struct rlimit space;
    int64_t pages = read_number("/proc/self", "statm", "");
    if (pages >= 0 && getrlimit(RLIMIT_AS, &space) == 0 && space.rlim_cur < INT64_MAX)
        take_min(&least, (int64_t)space.rlim_cur - pages * sysconf(_SC_PAGESIZE));
    return least;
}
