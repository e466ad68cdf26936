/* The thread pool of the CPU backend: one job at a time, threads joined by a generation barrier.
 *
 * Owns the worker threads and two counters on which they wait: `job`, incremented by so_pool_run,
 * and `phase`, incremented by every barrier. A waiting thread first spins, then sleeps in the
 * kernel on the counter (futex).
 *
 * Spinning covers the difference in arrival times at a barrier and the caller's work between two
 * jobs. Sleeping is expensive: in a virtual machine the wake-up takes long, and on a busy machine
 * the scheduler gives the core to another process although it is needed again at once. The spin
 * time must stay below a scheduler time slice (some milliseconds); otherwise two threads that share
 * their cores with other processes might never run at the same time. A pool with more threads than
 * usable cores does not spin.
 *
 * If the pool has exactly as many threads as there are usable cores, each thread is bound to one.
 * Otherwise the scheduler may queue two of them on one core while another process has a core to
 * itself. A pool on a range of cores of its own (a draft model's, or what it leaves to the target)
 * is bound in the same way. A smaller pool is not bound: the kernel can choose idle cores, and programs that
 * bind themselves to the first cores would all compete for the same ones. The calling thread is
 * bound only during a job, because threads that it creates inherit its mask. To bind and release it
 * takes 10 µs, a third of the shortest passes, so it is left alone where it is unlikely to be moved:
 * if it runs on its core already and its last job was short. SOOTH_NO_PIN disables binding.
 *
 * No wake-up is lost: the waker increments the counter and then reads `sleepers`; the sleeper
 * increments `sleepers` and then the kernel compares the counter. All four accesses are
 * sequentially consistent, so at least one of the two sees the other's write.
 *
 * Refuses nested jobs and two callers at once (asserted). The final barrier makes a job's results
 * visible to the caller of so_pool_run. */
#include "base/pool.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/cgroup.h"
#include "base/clock.h"
#include "base/env.h"
#include "base/mem.h"

/* Spin times. Speed on two cores shared with two busy processes, relative to an idle machine, for
 * different PHASE_SPIN_NS: 30 µs: 36 %, 300 µs: 41 %, 1 ms: 37 %, 3 ms: 15 %. Between jobs no thread
 * of the pool waits for a spinning one, so JOB_SPIN_NS may be longer. */
enum { MAX_THREADS = 256, PHASE_SPIN_NS = 300000, JOB_SPIN_NS = 1000000, SPINS_MAX = 1 << 20 };

/* Shorter jobs than this mostly end before the scheduler looks at its queues again. */
enum { SHORT_JOB_NS = 1000000 };

/* A counter and the number of threads that sleep until it changes, on a cache line of their own. */
typedef struct signal_word {
    _Alignas(64) _Atomic uint32_t value;
    _Atomic uint32_t sleepers;
} signal_word;

struct so_pool {
    signal_word job, phase;
    _Alignas(64) _Atomic int arrived;
    int count;
    int phase_spins, job_spins;
    bool pinned;
    cpu_set_t cores;  /* if pinned: one for each thread */
    int first_core;   /* if pinned: of the calling thread */
    int64_t last_job; /* if pinned: the time of the last job, ns */
    so_pool_fn *fn;   /* NULL: the workers exit */
    void *arg;
    atomic_flag busy;
    pthread_t *threads; /* [count - 1] */
    struct worker {
        so_pool *pool;
        int index;
    } * workers; /* [count - 1] */
};

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Sets the floating-point control register (MXCSR, FPCR) and returns its old value. */
static uint64_t fp_control_set(uint64_t word) {
    uint64_t old = 0;
#if defined(__x86_64__)
    old = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr((unsigned)word);
#elif defined(__aarch64__)
    __asm__ volatile("mrs %0, fpcr" : "=r"(old));
    __asm__ volatile("msr fpcr, %0" : : "r"(word));
#else
    (void)word;
#endif
    return old;
}

/* Round to nearest, denormals kept, no traps: every kernel's results depend on this. */
static uint64_t fp_control_default(void) {
#if defined(__x86_64__)
    return 0x1F80; /* all exceptions masked */
#else
    return 0;
#endif
}

/* Waits until the counter differs from `old`. Returns the number of spins, or −1 if it slept. */
static int wait_while(signal_word *w, uint32_t old, int spins) {
    for (int i = 0; i < spins; i++) {
        if (atomic_load_explicit(&w->value, memory_order_acquire) != old)
            return i;
        relax();
    }
    atomic_fetch_add(&w->sleepers, 1);
    while (atomic_load(&w->value) == old)
        syscall(SYS_futex, &w->value, FUTEX_WAIT_PRIVATE, old, NULL, NULL, 0);
    atomic_fetch_sub(&w->sleepers, 1);
    return -1;
}

static void raise_word(signal_word *w) {
    atomic_fetch_add(&w->value, 1);
    if (atomic_load(&w->sleepers) != 0)
        syscall(SYS_futex, &w->value, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

int so_pool_barrier(so_pool *p) {
    if (p->count == 1)
        return 0;
    uint32_t phase = atomic_load(&p->phase.value);
    if (atomic_fetch_add(&p->arrived, 1) + 1 == p->count) {
        atomic_store(&p->arrived, 0); /* before the other threads can reach the next barrier */
        raise_word(&p->phase);
        return 0;
    }
    return wait_while(&p->phase, phase, p->phase_spins);
}

double so_pool_spin_ns(const so_pool *p) {
    return p->phase_spins > 0 ? (double)PHASE_SPIN_NS / p->phase_spins : 0;
}

/* ---- cores ---- */

/* A set that holds only the index-th core of `cores`. */
static cpu_set_t core_of(const cpu_set_t *cores, int index) {
    cpu_set_t one;
    CPU_ZERO(&one);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, cores) && index-- == 0) {
            CPU_SET(cpu, &one);
            break;
        }
    return one;
}

/* Binds the calling thread to the core of thread `index`. If that fails the thread stays unbound,
 * which affects only speed. */
static void pin(const so_pool *p, int index) {
    if (!p->pinned)
        return;
    cpu_set_t one = core_of(&p->cores, index);
    sched_setaffinity(0, sizeof one, &one);
}

/* On machines with more than 1024 cores the mask does not fit into cpu_set_t and the pool stays
 * unbound. */
static void choose_cores(so_pool *p, so_core_range range) {
    int at = 0;
    p->pinned = (p->count > 1 || range.n > 0) && !so_env_no_pin() &&
                sched_getaffinity(0, sizeof p->cores, &p->cores) == 0;
    for (int cpu = 0; p->pinned && range.n > 0 && cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &p->cores)) {
            if (at < range.first || at >= range.first + range.n)
                CPU_CLR(cpu, &p->cores);
            at++;
        }
    p->pinned = p->pinned && CPU_COUNT(&p->cores) == p->count;
    for (int cpu = CPU_SETSIZE - 1; cpu >= 0; cpu--)
        if (CPU_ISSET(cpu, &p->cores))
            p->first_core = cpu;
    p->last_job = INT64_MAX;
}

static void *worker_main(void *arg) {
    struct worker *self = arg;
    so_pool *p = self->pool;
    pin(p, self->index);
    fp_control_set(fp_control_default());
    uint32_t job = 0;
    for (;;) {
        wait_while(&p->job, job, p->job_spins);
        job++;
        if (!p->fn)
            return NULL;
        p->fn(p->arg, self->index, p->count);
        so_pool_barrier(p);
    }
}

/* Nanoseconds of 1024 spins, measured because `pause` takes 10 to 150 cycles depending on the CPU.
 */
static int64_t measure_spins(void) {
    int64_t best = INT64_MAX;
    for (int round = 0; round < 4; round++) {
        int64_t t0 = so_clock_ns();
        for (int i = 0; i < 1024; i++)
            relax();
        int64_t t = so_clock_ns() - t0;
        best = SO_MIN(best, t);
    }
    return SO_MAX(best, 1);
}

static void choose_spins(so_pool *p) {
    if (p->count > so_cpu_count() || p->count == 1)
        return;
    int64_t t = measure_spins();
    p->phase_spins = (int)SO_MIN(PHASE_SPIN_NS * INT64_C(1024) / t, SPINS_MAX);
    p->job_spins = (int)SO_MIN(JOB_SPIN_NS * INT64_C(1024) / t, SPINS_MAX);
}

static void stop_workers(so_pool *p, int n_started) {
    p->fn = NULL;
    raise_word(&p->job);
    for (int i = 0; i < n_started; i++)
        pthread_join(p->threads[i], NULL);
}

int so_pool_create(int n_threads, so_pool **out, so_err *err) {
    return so_pool_create_on((so_core_range){0, 0}, n_threads, out, err);
}

int so_pool_create_on(so_core_range cores, int n_threads, so_pool **out, so_err *err) {
    if (n_threads < 1 || n_threads > MAX_THREADS)
        return so_err_set(err, SO_ERANGE, "%d threads requested; the number must be 1 to %d",
                          n_threads, MAX_THREADS);
    so_pool *p = so_try_aligned(sizeof *p);
    if (!p)
        return so_err_set(err, SO_ENOMEM, "no memory for a pool of %d threads", n_threads);
    memset(p, 0, sizeof *p);
    atomic_flag_clear(&p->busy);
    p->count = n_threads;
    choose_cores(p, cores);
    choose_spins(p);
    p->threads = SO_NEW_N(pthread_t, n_threads);
    p->workers = SO_NEW_N(struct worker, n_threads);
    for (int i = 0; i + 1 < n_threads; i++) {
        p->workers[i] = (struct worker){p, i + 1};
        int rc = pthread_create(&p->threads[i], NULL, worker_main, &p->workers[i]);
        if (rc != 0) {
            stop_workers(p, i);
            free(p->threads);
            free(p->workers);
            free(p);
            return so_err_set(err, SO_ELIMIT, "thread %d of %d cannot be started: %s", i + 2,
                              n_threads, strerror(rc));
        }
    }
    *out = p;
    return 0;
}

void so_pool_free(so_pool *p) {
    if (!p)
        return;
    stop_workers(p, p->count - 1);
    free(p->threads);
    free(p->workers);
    free(p);
}

int so_pool_count(const so_pool *p) { return p->count; }

/* Whether the calling thread should be bound during the next job. */
static bool may_be_moved(const so_pool *p) {
    return p->last_job > SHORT_JOB_NS || sched_getcpu() != p->first_core;
}

void so_pool_run(so_pool *p, so_pool_fn *fn, void *arg) {
    cpu_set_t old_cores;
    SO_ASSERT(fn != NULL);
    SO_ASSERT(!atomic_flag_test_and_set(&p->busy));
    uint64_t old = fp_control_set(fp_control_default());
    int64_t start = p->pinned ? so_clock_ns() : 0;
    bool bound =
        p->pinned && may_be_moved(p) && sched_getaffinity(0, sizeof old_cores, &old_cores) == 0;
    p->fn = fn;
    p->arg = arg;
    if (p->count > 1)
        raise_word(&p->job);
    if (bound)
        pin(p, 0);
    fn(arg, 0, p->count);
    so_pool_barrier(p);
    if (bound)
        sched_setaffinity(0, sizeof old_cores, &old_cores);
    if (p->pinned)
        p->last_job = so_clock_ns() - start;
    fp_control_set(old);
    atomic_flag_clear(&p->busy);
}

static int affinity_count(void) {
    for (size_t n_cpus = 1024; n_cpus <= 1 << 20; n_cpus *= 4) {
        cpu_set_t *set = CPU_ALLOC(n_cpus);
        if (!set)
            return 1;
        size_t bytes = CPU_ALLOC_SIZE(n_cpus);
        int rc = sched_getaffinity(0, bytes, set);
        int count = rc == 0 ? CPU_COUNT_S(bytes, set) : 0;
        CPU_FREE(set);
        if (rc == 0)
            return count;
        if (errno != EINVAL) /* EINVAL: the kernel's mask is larger */
            break;
    }
    return 1;
}

/* The number of cores that "quota period" in a cgroup's cpu.max amounts to, rounded up. INT_MAX for
 * "max" and if the file is missing. */
static int cgroup_quota(const char *path) {
    FILE *f = fopen(path, "re");
    if (!f)
        return INT_MAX;
    long quota, period;
    int n = fscanf(f, "%ld %ld", &quota, &period);
    fclose(f);
    if (n != 2 || quota <= 0 || period <= 0)
        return INT_MAX;
    long cores = (quota - 1) / period + 1;
    return cores < MAX_THREADS ? (int)cores : MAX_THREADS;
}

static void group_count(void *arg, const char *dir) {
    char path[1300];
    int *least = arg;
    snprintf(path, sizeof path, "%s/cpu.max", dir);
    *least = SO_MIN(*least, cgroup_quota(path));
}

int so_cpu_count(void) {
    int n = affinity_count();
    so_cgroup_walk(group_count, &n);
    return n < 1 ? 1 : SO_MIN(n, MAX_THREADS);
}
