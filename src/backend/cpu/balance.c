/* How much of the work each thread gets.
 *
 * Cores that are nominally equal are not: load on the sibling hyperthread, or on the host, makes a
 * core a third slower for seconds or minutes, and with an even split the faster threads spend that
 * third waiting. So the split follows the measured speed. It applies to columns of products and of
 * element-wise operations on them, to cache entries, and to queries of attention.
 *
 *   1. In a run each thread counts how long it waits at the barriers that end such work (in turns
 *      of the waiting loop: no clock is read).
 *   2. After the run, with s_i the part of a thread, w_i its waiting time and t the time of the
 *      run, s_i / (t − w_i) is the thread's speed. It is averaged over several passes.
 *   3. Parts become proportional to speeds once a border would move by more than 1/128 of the
 *      whole.
 *
 * In equilibrium all threads wait equally long, regardless of the work in the run that is not split
 * this way. A slow core is late at every barrier; a thread that was descheduled is very late at
 * one. Waiting at one barrier therefore counts at most as half the average time between two
 * barriers (cpu.c), so that beside a busy process the split stays about as it was.
 *
 * Work is split between output elements only, so the split changes no bit of any result. It is
 * fixed during a run: a thread that wrote columns of a range gets the same columns in the next
 * task. Called by the thread that owns the backend. */
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

/* Clamps speeds to a factor of two of their mean; returns their sum. */
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

void so_balance_update(so_balance *s, int64_t t_ns, double turn_ns) {
    double rate = SO_MIN((double)t_ns / AVERAGE_NS, 0.25);
    if (s->count == 1 || t_ns <= 0)
        return;
    for (int i = 0; i < s->count; i++) {
        double part = (double)(s->cut[i + 1] - s->cut[i]) / SO_BALANCE_ONE * s->count;
        double busy = SO_MAX(1 - (double)s->waited[i] * turn_ns / (double)t_ns, 0.5);
        s->speed[i] += rate * (part / busy - s->speed[i]);
    }
    move_cuts(s);
}
