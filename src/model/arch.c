/* The table of architectures; arch.h has the contract. Pure lookups; any thread. */
#include "model/arch.h"

#include <stdio.h>

#include "base/mem.h"

static const so_arch_info *const table[] = {
    [SO_ARCH_LLAMA] = &so_arch_llama, [SO_ARCH_QWEN2] = &so_arch_qwen2,
    [SO_ARCH_QWEN3] = &so_arch_qwen3, [SO_ARCH_GEMMA3] = &so_arch_gemma3,
    [SO_ARCH_GPT2] = &so_arch_gpt2,   [SO_ARCH_T5] = &so_arch_t5,
};

const so_arch_info *so_arch_get(so_arch arch) {
    SO_ASSERT_OP(arch, <, SO_LEN(table));
    return table[arch];
}

static bool among(so_str name, const char *const *list, size_t n) {
    for (size_t i = 0; i < n && list[i]; i++)
        if (so_str_eq_c(name, list[i]))
            return true;
    return false;
}

bool so_arch_by_name(so_str name, so_arch *out) {
    for (size_t i = 0; i < SO_LEN(table); i++)
        if (among(name, table[i]->names, SO_LEN(table[i]->names)) ||
            among(name, table[i]->aliases, SO_LEN(table[i]->aliases))) {
            *out = (so_arch)i;
            return true;
        }
    return false;
}

bool so_arch_by_class(so_str name, so_arch *out) {
    for (size_t i = 0; i < SO_LEN(table); i++)
        if (among(name, table[i]->classes, SO_LEN(table[i]->classes))) {
            *out = (so_arch)i;
            return true;
        }
    return false;
}

const char *so_arch_list(char buf[SO_ARCH_LIST_CAP]) {
    size_t len = 0;
    for (size_t i = 0; i < SO_LEN(table); i++)
        for (size_t k = 0; k < SO_LEN(table[i]->names) && table[i]->names[k]; k++) {
            len += (size_t)snprintf(buf + len, SO_ARCH_LIST_CAP - len, len ? ", %s" : "%s",
                                    table[i]->names[k]);
            SO_ASSERT_OP(len, <, SO_ARCH_LIST_CAP);
        }
    return buf;
}
