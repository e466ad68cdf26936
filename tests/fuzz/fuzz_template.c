/* Fuzzes the template interpreter. The bytes up to the first NUL are a template, rendered with
 * VARS; bytes after the NUL are JSON variables used instead. */
#include <string.h>

#include "jinja/template.h"

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t len);

static const char VARS[] =
    "{\"messages\":[{\"role\":\"system\",\"content\":\"Be brief.\"},{\"role\":\"user\",\"content\":"
    "\" Gr\u00fc\u00dfe "
    "\\n\"},{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"function\":"
    "{\"name\":\"f\",\"arguments\":{\"a\":1,\"b\":[1.5,true]}}}]}],\"tools\":[{\"function\":{"
    "\"name\":"
    "\"f\"}}],\"l\":[3,1,2],\"s\":\"a,b\",\"n\":null,\"i\":7,\"x\":2.5,\"d\":{\"b\":1,\"a\":{}},"
    "\"add_generation_prompt\":true,\"bos_token\":\"<s>\"}";

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t len) {
    const unsigned char *nul = len ? memchr(data, '\0', len) : NULL;
    size_t n = nul ? (size_t)(nul - data) : len;
    so_template *t = NULL;
    so_err err;
    if (so_template_compile((so_str){(const char *)data, n}, &t, &err) != 0)
        return 0;
    json_t *vars = nul ? json_loadb((const char *)nul + 1, len - n - 1, JSON_ALLOW_NUL, NULL)
                       : json_loads(VARS, 0, NULL);
    so_buf out = {0};
    if (vars)
        so_template_render(t, vars, 1735787045, &out, &err);
    so_buf_free(&out);
    json_decref(vars);
    so_template_free(t);
    return 0;
}
