/* Rotary positions: frequencies once per model, (cos, sin) once per row.
 *
 * Rounds as the transformers library does: inverse frequencies in float32, the angle a float32
 * product of position and frequency. Cosine and sine are computed in double, rounded to
 * float and then scaled. The table of a position depends on the position alone. Pure functions; any thread. */
#include <math.h>

#include "base/mem.h"
#include "model/impl.h"

/* Llama 3.1: long wavelengths are multiplied by `factor`, short ones kept, those between
 * blended. */
static float scale_llama3(const so_hparams *hp, float freq) {
    float ctx = (float)hp->rope_ctx_orig;
    float wavelen = (float)(2 * M_PI) / freq;
    if (wavelen < ctx / hp->rope_high)
        return freq;
    if (wavelen > ctx / hp->rope_low)
        return freq / hp->rope_factor;
    float smooth = (ctx / wavelen - hp->rope_low) / (hp->rope_high - hp->rope_low);
    return (1 - smooth) * freq / hp->rope_factor + smooth * freq;
}

/* The dimension that rotates `rotations` times over the original context (YaRN, section 3.2). */
static double yarn_dim(const so_hparams *hp, double rotations) {
    return hp->rope_dim * log(hp->rope_ctx_orig / (rotations * 2 * M_PI)) /
           (2 * log((double)hp->rope_base));
}

static float scale_yarn(const so_hparams *hp, float wave, int i) {
    double low = SO_MAX(floor(yarn_dim(hp, (double)hp->rope_beta_fast)), 0.0);
    double high = SO_MIN(ceil(yarn_dim(hp, (double)hp->rope_beta_slow)), hp->rope_dim - 1.0);
    if (low == high)
        high += 0.001;
    float ramp = (float)((i - low) / (high - low));
    ramp = ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
    return 1.0f / (hp->rope_factor * wave) * ramp + 1.0f / wave * (1 - ramp);
}

void so_rope_inv_freq(const so_hparams *hp, bool local, const float *factors, float *inv_freq) {
    double base = (double)(local ? hp->rope_base_local : hp->rope_base);
    for (int i = 0; i < hp->rope_dim / 2; i++) {
        float exponent = (float)(2 * i) / (float)hp->rope_dim;
        float wave = (float)pow(base, (double)exponent), freq = 1.0f / wave;
        if (!local && hp->rope_scaling == SO_ROPE_SCALING_LINEAR)
            freq /= hp->rope_factor;
        else if (!local && hp->rope_scaling == SO_ROPE_SCALING_LLAMA3)
            freq = scale_llama3(hp, freq);
        else if (!local && hp->rope_scaling == SO_ROPE_SCALING_YARN)
            freq = scale_yarn(hp, wave, i);
        if (!local && factors)
            freq /= factors[i];
        inv_freq[i] = freq;
    }
}

void so_rope_fill(const float *inv_freq, int n, float scale, int32_t pos, float *table) {
    for (int i = 0; i < n; i++) {
        double angle = (double)((float)pos * inv_freq[i]);
        table[2 * i] = (float)cos(angle) * scale;
        table[2 * i + 1] = (float)sin(angle) * scale;
    }
}
