/* The thread pool: every thread runs once, barriers order memory, splits cover all items. Run it
 * under the thread sanitizer too: the counters are not atomic, so a missing ordering is a race. */
#include "so_test.h"

#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/pool.h"

enum { MAX_TEAM = 9 };

typedef struct team {
    so_pool *pool;
    long cells[MAX_TEAM]; /* not atomic on purpose */
    int rounds;
    int pause_us; /* one thread pauses, so that the others go to sleep */
    bool wrong;
} team;

/* In each round every thread sums all cells and, after a barrier, writes the sum into its own. */
static void sum_rounds(void *arg, int index, int count) {
    team *t = arg;
    for (int r = 0; r < t->rounds; r++) {
        long sum = 1;
        for (int i = 0; i < count; i++)
            sum += t->cells[i];
        if (t->pause_us && r % 16 == 5 && index == count - 1)
            usleep((useconds_t)t->pause_us);
        so_pool_barrier(t->pool);
        t->cells[index] = sum % 1000003;
        so_pool_barrier(t->pool);
    }
}

static long expected(int count, int jobs, int rounds) {
    long cell = 0;
    for (int i = 0; i < jobs * rounds; i++)
        cell = (1 + count * cell) % 1000003;
    return cell;
}

static void run_team(int count, int jobs, int rounds, int pause_us) {
    team t = {.rounds = rounds, .pause_us = pause_us};
    so_err err = {0};
    SO_OK_OR_FAIL(so_pool_create(count, &t.pool, &err), err);
    assert_int_equal(so_pool_count(t.pool), count);
    for (int j = 0; j < jobs; j++)
        so_pool_run(t.pool, sum_rounds, &t);
    for (int i = 0; i < count; i++)
        assert_int_equal(t.cells[i], expected(count, jobs, rounds));
    so_pool_free(t.pool);
}

static void barriers_order_memory(void **state) {
    (void)state;
    for (int count = 1; count <= 4; count++)
        run_team(count, 50, 40, 0);
    run_team(MAX_TEAM, 20, 20, 0); /* more than most machines have cores: no spinning */
}

static void sleepers_wake(void **state) {
    (void)state;
    run_team(2, 4, 32, 2000);
    run_team(4, 4, 32, 2000);
}

static void many_short_jobs(void **state) {
    (void)state;
    run_team(3, 2000, 1, 0);
    for (int i = 0; i < 50; i++)
        run_team(2, 1, 1, 0); /* created and freed at once */
}

static void control_word(void *arg, int index, int count) {
    team *t = arg;
    (void)index, (void)count;
    volatile float tiny = 0x1p-126f, half = 0.5f, one = 1.0f, eps = 0x1p-24f;
    if (tiny * half == 0.0f || one + eps != 1.0f || one + 3 * eps != 1.0f + 0x1p-22f)
        t->wrong = true;
}

/* A caller that flushes denormals must not change the results of the work it does itself. */
static void denormals_are_kept(void **state) {
    (void)state;
    team t = {0};
    so_err err = {0};
    SO_OK_OR_FAIL(so_pool_create(1, &t.pool, &err), err);
#if defined(__x86_64__)
    unsigned old = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(old | 0xE040u); /* flush, denormals are zero, toward zero */
#endif
    so_pool_run(t.pool, control_word, &t);
#if defined(__x86_64__)
    assert_int_equal(__builtin_ia32_stmxcsr() & 0xE040u, 0xE040u);
    __builtin_ia32_ldmxcsr(old);
#endif
    assert_false(t.wrong);
    so_pool_free(t.pool);
}

/* Where the caller ran during a job, and how many cores it might have run on. */
typedef struct visit {
    int core, n_cores;
    int pause_us;
} visit;

static void look_around(void *arg, int index, int count) {
    visit *v = arg;
    cpu_set_t mask;
    (void)count;
    if (index != 0)
        return;
    assert_int_equal(sched_getaffinity(0, sizeof mask, &mask), 0);
    *v = (visit){sched_getcpu(), CPU_COUNT(&mask), v->pause_us};
    if (v->pause_us)
        usleep((useconds_t)v->pause_us);
}

/* The caller computes on the first core, wherever it was before, and is bound to it only where it
 * would have to move or where a job was long; its mask is unchanged afterwards. */
static void the_caller_is_bound(void **state) {
    (void)state;
    cpu_set_t all, last, after;
    int first_core = 0, last_core = 0, n_free = 0;
    assert_int_equal(sched_getaffinity(0, sizeof all, &all), 0);
    for (int cpu = CPU_SETSIZE - 1; cpu >= 0; cpu--)
        if (CPU_ISSET(cpu, &all))
            last_core = SO_MAX(last_core, cpu), first_core = cpu;
    int n = CPU_COUNT(&all);
    if (n < 2 || n > 64 || getenv("SOOTH_NO_PIN"))
        SO_SKIP("nothing is bound on a machine with %d cores", n);
    CPU_ZERO(&last);
    CPU_SET(last_core, &last);
    so_pool *p = NULL;
    so_err err = {0};
    SO_OK_OR_FAIL(so_pool_create(n, &p, &err), err);
    for (int i = 0; i < 200; i++) {
        visit v = {.pause_us = i % 20 == 0 ? 3000 : 0};
        bool move = i % 5 == 3;
        if (move)
            assert_int_equal(sched_setaffinity(0, sizeof last, &last), 0);
        so_pool_run(p, look_around, &v);
        if (move || i == 0 || i % 20 == 1) { /* elsewhere, the first job, one after a long one */
            assert_int_equal(v.core, first_core);
            assert_int_equal(v.n_cores, 1);
        }
        n_free += v.n_cores == n;
        assert_int_equal(sched_getaffinity(0, sizeof after, &after), 0);
        assert_true(CPU_EQUAL(&after, move ? &last : &all));
        assert_int_equal(sched_setaffinity(0, sizeof all, &all), 0);
    }
    assert_in_range(n_free, 1, 200);
    so_pool_free(p);
}

static void bad_counts(void **state) {
    (void)state;
    so_pool *p = NULL;
    so_err err = {0};
    assert_int_equal(so_pool_create(0, &p, &err), SO_ERANGE);
    assert_int_equal(so_pool_create(257, &p, &err), SO_ERANGE);
    assert_non_null(strstr(err.msg, "257"));
    assert_null(p);
    so_pool_free(NULL);
    assert_in_range(so_cpu_count(), 1, 256);
}

static void splits_cover(void **state) {
    (void)state;
    static const long sizes[] = {0, 1, 7, 16, 31, 32, 33, 576, 577, 49152};
    static const long grains[] = {1, 8, 16};
    for (size_t s = 0; s < SO_LEN(sizes); s++)
        for (size_t g = 0; g < SO_LEN(grains); g++)
            for (int count = 1; count <= 9; count++) {
                long at = 0;
                for (int i = 0; i < count; i++) {
                    long begin, end;
                    so_split(sizes[s], grains[g], i, count, &begin, &end);
                    assert_int_equal(begin, at);
                    assert_true(end >= begin);
                    assert_true(begin % grains[g] == 0 || begin == sizes[s]);
                    at = end;
                }
                assert_int_equal(at, sizes[s]);
            }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(barriers_order_memory), cmocka_unit_test(sleepers_wake),
        cmocka_unit_test(many_short_jobs),       cmocka_unit_test(the_caller_is_bound),
        cmocka_unit_test(denormals_are_kept),    cmocka_unit_test(bad_counts),
        cmocka_unit_test(splits_cover),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
