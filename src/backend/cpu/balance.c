/* How much of the work each thread gets.
 *
 * Equal cores are not equally fast: load on the sibling hyperthread, or on the host, can make a
 * core a third slower for seconds or minutes. With an even split the other threads would wait for
 * the slow one. So work is split in proportion to the measured speed of each thread: the output
 * columns of matrix products, element-wise operations on these columns, writes of cache entries,
 * and the queries of attention ("weighted" tasks in cpu.c).
 *
 *   1. During a run each thread counts how long it waits at the barriers that follow such work. The
 *      unit is a spin, an iteration of the waiting loop, so that no clock is read.
 *   2. After the run the speed of thread i is s_i / (t − w_i), where s_i is its part of the work,
 *      w_i its waiting time and t the time of the run. Speeds are averaged over several passes.
 *   3. The parts are set proportional to the speeds as soon as this moves a border by more than
 *      1/128 of the whole.
 *
 * In equilibrium all threads wait equally long. t also includes work that is split otherwise, which
 * slows the adjustment but does not move the equilibrium. A slow core is late at every barrier, but
 * a thread that was descheduled is very late at one. So the time waited at one barrier is capped at
 * half the average time between two barriers (cpu.c). The split then hardly changes when another
 * process runs for a moment.
 *
 * The work is split between output elements only, so results are bit-identical for any split. The
 * split is fixed during a run: a thread that wrote some columns of a range gets the same columns in
 * the next task. Called by the thread that owns the backend. */
#include "backend/cpu/cpu.h"
#include "base/mem.h"

enum { AVERAGE_NS = 20000000, MOVE_MIN = SO_BALANCE_ONE / 128 };

void so_balance_init(so_balance *s, int count) {
    SO_ASSERT(count >= 1 && count <= SO_BALANCE_MAX);
    s->count = count;
    for (int i = 0; i < count; i++)
        s->speed[i] = 1;
    for (int i = 0; i <= count; i++)
        s->cut[i] = (int32_t)((int64_t)SO_BALANCE_ONE * i / count);
}

/* Clamps speeds to between half and twice their mean; returns their sum. */
static double bound_speeds(so_balance *s) {
    double sum = 0, bounded = 0;
    for (int i = 0; i < s->count; i++)
        sum += s->speed[i];
    double mean = sum / s->count;
    for (int i = 0; i < s->count; i++) {
        s->speed[i] = SO_MIN(SO_MAX(s->speed[i], mean / 2), mean * 2);
        bounded += s->speed[i];
    }
    return bounded;
}

static void move_cuts(so_balance *s) {
    int32_t cut[SO_BALANCE_MAX + 1] = {0};
    double sum = bound_speeds(s), before = 0;
    bool moved = false;
    for (int i = 1; i < s->count; i++) {
        before += s->speed[i - 1];
        cut[i] = (int32_t)(SO_BALANCE_ONE * before / sum);
        int32_t by = cut[i] - s->cut[i];
        moved |= by > MOVE_MIN || by < -MOVE_MIN;
    }
    for (int i = 1; moved && i < s->count; i++)
        s->cut[i] = cut[i];
}

void so_balance_update(so_balance *s, int64_t t_ns, double spin_ns) {
    double rate = SO_MIN((double)t_ns / AVERAGE_NS, 0.25);
    if (s->count == 1 || t_ns <= 0)
        return;
    for (int i = 0; i < s->count; i++) {
        double part = (double)(s->cut[i + 1] - s->cut[i]) / SO_BALANCE_ONE * s->count;
        double busy = SO_MAX(1 - (double)s->waited[i] * spin_ns / (double)t_ns, 0.5);
        s->speed[i] += rate * (part / busy - s->speed[i]);
    }
    move_cuts(s);
}
