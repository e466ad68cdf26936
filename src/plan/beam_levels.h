/* How many levels of candidates a speculated beam search verifies in a pass. Learned from its own
 * passes, for one width and number of candidates:
 *
 *   time      ms of a pass with its draft, by number of levels: a moving average
 *   chance    that a level is accepted, given the levels before it; by level
 *
 * Expected steps with n levels: E(n) = 1 + a1 + a1·a2 + …; the choice is the n with the largest
 * E(n)/time(n). A number that was never tried is tried if it could win even at its best: at the time
 * of the next smaller one. Every REFRESH passes another number is measured again, because the
 * machine's speed changes.
 *
 * Numbers of levels change how long a search takes, never its result. No clock; engine thread. */
#ifndef SO_PLAN_BEAM_LEVELS_H
#define SO_PLAN_BEAM_LEVELS_H

enum { SO_BEAM_LEVELS = 8 }; /* levels at most */

/* Zero-initialise. */
typedef struct so_beam_levels {
    int width, candidates; /* what the rest was measured with */
    double ms[SO_BEAM_LEVELS + 1];
    int n[SO_BEAM_LEVELS + 1]; /* passes measured */
    double tested[SO_BEAM_LEVELS], accepted[SO_BEAM_LEVELS];
    int n_passes;
} so_beam_levels;

/* The number of levels of the next pass, at most `most`. Forgets everything if width or candidates
 * have changed. */
int so_beam_levels_choose(so_beam_levels *b, int width, int candidates, int most);
/* A pass with n levels, of which `tested` were tested and `accepted` accepted. ms < 0: not a usual
 * pass, its time is not counted. */
void so_beam_levels_observe(so_beam_levels *b, int n, int tested, int accepted, double ms);

#endif
