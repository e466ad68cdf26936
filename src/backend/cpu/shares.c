/* How much of the work each member of the team gets.
 *
 * Cores that are sold as equal are not: a neighbour on the other half of one, or the host itself,
 * makes it a third slower for seconds or minutes, and with equal shares the quicker one spends that
 * third waiting. So shares follow the speed that was seen. What is shared so: columns of products
 * and of what is computed from them element by element, entries of the cache, queries of attention.
 *
 *   1. In a run each member counts how long it waits at the meetings that end such work (turns of
 *      the waiting loop: no clock is read).
 *   2. After it, with s_i the share of a member, w_i its waiting and t the time of the run,
 *      s_i / (t − w_i) is its speed, which is averaged over some passes.
 *   3. Shares become proportional to speeds once a border would move by 1/128 of the whole.
 *
 * At rest all members wait alike, whatever of the run cannot be shared. A slow core is late at
 * every meeting, a member that lost its core for a while is very late at one: no meeting counts for
 * more than half the average time between two of them (cpu.c), so that beside a busy process shares
 * stay about as they were. Outputs are split between elements only, so shares change no bit of any
 * result.
 *
 * Shares are fixed while a run goes on, so that whoever wrote columns of a range finds the same
 * ones again. Called by the thread that owns the backend. */
#include "backend/cpu/cpu.h"
#include "base/mem.h"

enum { AVERAGE_NS = 20000000, MOVE = SO_SHARE_ONE / 128 };

void so_shares_init(so_shares *s, int count) {
    SO_ASSERT(count >= 1 && count <= SO_SHARES_MAX);
    s->count = count;
    for (int i = 0; i < count; i++)
        s->speed[i] = 1;
    for (int i = 0; i <= count; i++)
        s->cut[i] = (int32_t)((int64_t)SO_SHARE_ONE * i / count);
}

/* Speeds stay within a factor of two of their mean. */
static double bound_speeds(so_shares *s) {
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

static void move_cuts(so_shares *s) {
    int32_t cut[SO_SHARES_MAX + 1] = {0};
    double sum = bound_speeds(s), before = 0;
    bool moved = false;
    for (int i = 1; i < s->count; i++) {
        before += s->speed[i - 1];
        cut[i] = (int32_t)(SO_SHARE_ONE * before / sum);
        int32_t by = cut[i] - s->cut[i];
        moved |= by > MOVE || by < -MOVE;
    }
    for (int i = 1; moved && i < s->count; i++)
        s->cut[i] = cut[i];
}

void so_shares_learn(so_shares *s, int64_t t_ns, double turn_ns) {
    double rate = SO_MIN((double)t_ns / AVERAGE_NS, 0.25);
    if (s->count == 1 || t_ns <= 0)
        return;
    for (int i = 0; i < s->count; i++) {
        double share = (double)(s->cut[i + 1] - s->cut[i]) / SO_SHARE_ONE * s->count;
        double busy = SO_MAX(1 - (double)s->waited[i] * turn_ns / (double)t_ns, 0.5);
        s->speed[i] += rate * (share / busy - s->speed[i]);
    }
    move_cuts(s);
}
