/* config.json → hparams: whatever the bytes, a shape within its ranges or an error with a message.
 */
#include <jansson.h>
#include <stddef.h>
#include <stdint.h>

#include "model/hparams.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
    json_error_t je;
    json_t *config = json_loadb((const char *)data, len, JSON_DECODE_ANY, &je);
    if (!config)
        return 0;
    so_hparams hp;
    so_err err = {0};
    if (so_hparams_from_json(config, "config.json", &hp, &err) == 0) {
        SO_ASSERT(hp.n_layers >= 1 && hp.n_layers <= 1024);
        SO_ASSERT(hp.n_heads >= 1 && hp.n_heads_kv >= 1 && hp.n_heads % hp.n_heads_kv == 0);
        SO_ASSERT(hp.head_dim >= 1 && hp.head_dim <= 1024);
        SO_ASSERT(hp.d_model >= 1 && hp.d_ff >= 1 && hp.n_vocab >= 1 && hp.n_ctx_train >= 1);
        SO_ASSERT(hp.rope_dim == 0 || hp.rope_dim == hp.head_dim);
        SO_ASSERT(hp.norm_eps > 0);
        SO_ASSERT(hp.window >= 0 && hp.window_pattern >= 0);
        SO_ASSERT(so_hparams_kv_bytes_per_token(&hp, SO_DTYPE_F32) > 0);
    } else {
        SO_ASSERT(err.code != 0 && err.msg[0] != '\0');
    }
    json_decref(config);
    return 0;
}
