/* Measures the two limits of the roofline: every thread of the backend reads its part of a buffer,
 * or multiplies in registers.
 *
 * The measured bandwidth must be the best that any code can reach; otherwise kernels would exceed
 * their own limit. So the buffer is in huge pages where the kernel provides them, like packed
 * weights, and it is read both in one sweep and block by block with software prefetch. The faster
 * read counts; which one is faster depends on the machine and on whether the buffer fits a cache.
 * Nothing else may use the backend during a measurement. */
#include "backend/probe.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "backend/cpu/cpu.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/mem.h"
#include "base/str.h"

enum {
    ROUNDS = 5,
    SETTLE_ROUNDS = 10,
    MAC_CALLS = 1 << 16,
    HUGE_PAGE = 2 << 20,
    READ_BLOCK = 4096,     /* bytes read between two batches of prefetches */
    PREFETCH_AHEAD = 8192, /* prefetch distance in bytes */
    LINE = 64
};

static const double SETTLE_SECONDS = 0.06;

struct so_prober {
    so_backend *device; /* measures itself; uses only n_bytes and `last`. NULL: cpu */
    so_probe last;      /* the device's last result */
    so_cpu *cpu;
    unsigned char *map, *data;
    size_t map_bytes, n_bytes;
    bool ahead;            /* read with software prefetch */
    _Atomic uint64_t sink; /* keeps the compiler from removing the loops */
    _Atomic long n_macs;
};

static uint64_t read_ahead(const so_kernels *kernels, const uint8_t *p, size_t n) {
    uint64_t sum = 0;
    for (size_t at = 0; at < n; at += READ_BLOCK) {
        for (size_t i = 0; i < READ_BLOCK && at + PREFETCH_AHEAD + i < n; i += LINE)
            __builtin_prefetch(p + at + PREFETCH_AHEAD + i, 0, 2);
        sum ^= kernels->read_all(p + at, SO_MIN(n - at, (size_t)READ_BLOCK));
    }
    return sum;
}

static void read_part(void *arg, int index, int count) {
    so_prober *p = arg;
    const so_kernels *kernels = p->cpu->kernels;
    long begin, end;
    so_split((long)p->n_bytes, 4096, index, count, &begin, &end);
    size_t n = (size_t)(end - begin);
    p->sink +=
        p->ahead ? read_ahead(kernels, p->data + begin, n) : kernels->read_all(p->data + begin, n);
}

static void multiply(void *arg, int index, int count) {
    (void)index;
    (void)count;
    so_prober *p = arg;
    p->n_macs += p->cpu->kernels->multiply_all(MAC_CALLS);
}

static double seconds(so_prober *p, so_pool_fn *fn) {
    int64_t t = so_clock_ns();
    so_pool_run(p->cpu->pool, fn, p);
    return (double)(so_clock_ns() - t) * 1e-9;
}

int so_prober_create(so_backend *b, size_t n_bytes, so_prober **out, so_err *err) {
    if (b->vt->probe) {
        so_probe first;
        int rc = b->vt->probe(b, n_bytes, &first, err);
        if (rc == SO_OK) {
            *out = SO_NEW(so_prober);
            **out = (so_prober){.device = b, .n_bytes = n_bytes, .last = first};
        }
        return rc;
    }
    if (strcmp(b->vt->name, "cpu") != 0)
        return so_err_set(err, SO_EUNSUPPORTED, "backend %s cannot be probed; use backend cpu",
                          b->vt->name);
    size_t map_bytes;
    void *map = MAP_FAILED;
    if (so_add_size(n_bytes, HUGE_PAGE, &map_bytes))
        map = mmap(NULL, map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED)
        return so_err_set(err, SO_ENOMEM, "no memory for a probe buffer of %zu bytes", n_bytes);
    so_prober *p = SO_NEW(so_prober);
    p->cpu = (so_cpu *)b;
    p->map = map;
    p->map_bytes = map_bytes;
    p->n_bytes = n_bytes;
    p->data = p->map + (-(uintptr_t)map & (HUGE_PAGE - 1));
    madvise(p->data, n_bytes, MADV_HUGEPAGE); /* advice only; small pages work too */
    memset(p->data, 1, n_bytes);
    *out = p;
    return SO_OK;
}

void so_prober_free(so_prober *p) {
    if (!p)
        return;
    if (p->map)
        munmap(p->map, p->map_bytes);
    free(p);
}

so_probe so_prober_measure(so_prober *p) {
    so_err err;
    if (p->device) { /* on failure the old figures stay; the next pass reports the error */
        p->device->vt->probe(p->device, p->n_bytes, &p->last, &err);
        return p->last;
    }
    double best = 1e30, spent = 0;
    /* earlier data leaves the caches gradually, over several reads */
    for (int i = 0; i < SETTLE_ROUNDS && spent < SETTLE_SECONDS; i++)
        spent += seconds(p, read_part);
    for (int ahead = 0; ahead < 2; ahead++) {
        p->ahead = ahead;
        double s = seconds(p, read_part);
        best = SO_MIN(best, s);
    }
    p->n_macs = 0;
    double s = seconds(p, multiply);
    return (so_probe){.read_gb = (double)p->n_bytes / best * 1e-9,
                      .mac_giga = (double)p->n_macs / s * 1e-9};
}

int so_backend_probe(so_backend *b, size_t n_bytes, so_probe *out, so_err *err) {
    so_prober *p;
    int rc = so_prober_create(b, n_bytes, &p, err);
    if (rc != SO_OK)
        return rc;
    *out = (so_probe){0};
    for (int i = 0; i < ROUNDS; i++) {
        so_probe t = so_prober_measure(p);
        out->read_gb = SO_MAX(out->read_gb, t.read_gb);
        out->mac_giga = SO_MAX(out->mac_giga, t.mac_giga);
    }
    so_prober_free(p);
    return SO_OK;
}

/* Linux describes the caches of a core in index0, index1, … sysconf computes the size of a shared
 * cache from other figures, which a hypervisor may present inconsistently: 256 MB instead of 32. */
static size_t cache_from_sysfs(void) {
    size_t best = 0;
    int best_level = 1;
    for (int i = 0; i < 8; i++) {
        char path[80];
        so_buf level = {0}, size = {0};
        int number;
        unsigned long kb;
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/level", i);
        bool good = so_file_exists(path) && so_file_read(path, 64, &level, NULL) == SO_OK;
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/size", i);
        good = good && so_file_exists(path) && so_file_read(path, 64, &size, NULL) == SO_OK;
        if (good) {
            so_buf_append_char(&level, '\0');
            so_buf_append_char(&size, '\0');
            if (sscanf(level.data, "%1d", &number) == 1 && sscanf(size.data, "%9luK", &kb) == 1 &&
                number > best_level) {
                best_level = number;
                best = (size_t)kb << 10;
            }
        }
        so_buf_free(&level);
        so_buf_free(&size);
    }
    return best;
}

size_t so_cpu_cache_bytes(void) {
    static const int names[] = {_SC_LEVEL4_CACHE_SIZE, _SC_LEVEL3_CACHE_SIZE,
                                _SC_LEVEL2_CACHE_SIZE};
    size_t found = cache_from_sysfs();
    for (size_t i = 0; i < SO_LEN(names) && found == 0; i++) {
        long n = sysconf(names[i]);
        if (n > 0)
            found = (size_t)n;
    }
    return found;
}

size_t so_probe_bytes_within(void) { return so_cpu_cache_bytes() / 2 / 4096 * 4096; }

size_t so_probe_bytes_past(void) {
    const size_t least = 256 << 20, most = (size_t)1 << 30;
    return SO_MIN(SO_MAX(8 * so_cpu_cache_bytes(), least), most);
}
