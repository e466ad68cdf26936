/* The roofline's two sides: every thread of the backend reads its part of a buffer, or multiplies
 * in registers. The best of a few rounds is taken: a disturbed one says nothing about the machine.
 */
#include "backend/probe.h"

#include <sys/mman.h>

#include "backend/cpu/cpu.h"
#include "base/clock.h"
#include "base/mem.h"

enum { ROUNDS = 5, MAC_CALLS = 1 << 16 };

typedef struct job {
    const so_kernels *kernels;
    const uint8_t *data;
    size_t n_bytes;
    _Atomic uint64_t sink; /* so that no loop is left out */
    _Atomic long n_macs;
} job;

static void read_part(void *arg, int index, int count) {
    job *j = arg;
    long begin, end;
    so_split((long)j->n_bytes, 4096, index, count, &begin, &end);
    j->sink += j->kernels->read_all(j->data + begin, (size_t)(end - begin));
}

static void multiply(void *arg, int index, int count) {
    (void)index;
    (void)count;
    job *j = arg;
    j->n_macs += j->kernels->multiply_all(MAC_CALLS);
}

static double best_seconds(so_pool *pool, so_pool_fn *fn, job *j) {
    double best = 1e30;
    for (int i = 0; i < ROUNDS; i++) {
        j->n_macs = 0;
        int64_t t = so_clock_ns();
        so_pool_run(pool, fn, j);
        double s = (double)(so_clock_ns() - t) * 1e-9;
        best = SO_MIN(best, s);
    }
    return best;
}

int so_backend_cpu_probe(so_backend *b, size_t n_bytes, so_probe *out, so_err *err) {
    so_cpu *cpu = (so_cpu *)b;
    SO_ASSERT(strcmp(b->vt->name, "cpu") == 0);
    void *data = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED)
        return so_err_set(err, SO_ENOMEM, "no memory for a probe of %zu bytes", n_bytes);
    memset(data, 1, n_bytes);
    job j = {.kernels = cpu->kernels, .data = data, .n_bytes = n_bytes};
    out->read_gb = (double)n_bytes / best_seconds(cpu->pool, read_part, &j) * 1e-9;
    double s = best_seconds(cpu->pool, multiply, &j);
    out->mac_giga = (double)j.n_macs / s * 1e-9;
    munmap(data, n_bytes);
    return SO_OK;
}
