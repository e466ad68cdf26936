/* The page at /: the file web/index.html, which the assembler includes in the program. The page
 * needs no other file.
 *
 * Its content security policy allows the script and the style in the file, named by their hashes,
 * images in data: URLs (the icon), and requests to this server. Everything else is blocked, so a
 * model's text cannot run scripts. */
#include "base/sha256.h"
#include "server/impl.h"

__asm__(".pushsection .rodata\n"
        ".global so_page_begin\n"
        ".global so_page_end\n"
        "so_page_begin:\n"
        ".incbin \"web/index.html\"\n"
        "so_page_end:\n"
        ".byte 0\n"
        ".popsection\n");

extern const char so_page_begin[], so_page_end[];

so_str so_page(void) { return (so_str){so_page_begin, (size_t)(so_page_end - so_page_begin)}; }

/* The text between two tags, each of which occurs once in the page. */
static so_str between(so_str page, const char *open, const char *close) {
    const char *at = memmem(page.ptr, page.len, open, strlen(open));
    SO_ASSERT(at != NULL);
    at += strlen(open);
    const char *end = memmem(at, (size_t)(page.ptr + page.len - at), close, strlen(close));
    SO_ASSERT(end != NULL);
    return (so_str){at, (size_t)(end - at)};
}

static unsigned hex_digit(char c) { return (unsigned)(c <= '9' ? c - '0' : c - 'a' + 10); }

/* Appends 'sha256-' and the hash in base64, the form that the policy needs. Three hex digits make
 * two base64 digits; the 64th, padded with zeros, makes the last one, and '=' fills the group. */
static void append_hash(so_str text, so_buf *out) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    so_sha256 h;
    char hex[65 + 2] = {0};
    so_sha256_init(&h);
    so_sha256_add(&h, text.ptr, text.len);
    so_sha256_hex(&h, hex);
    hex[64] = hex[65] = '0';
    so_buf_append_c(out, "'sha256-");
    for (int i = 0; i < 66; i += 3) {
        unsigned bits = hex_digit(hex[i]) << 8 | hex_digit(hex[i + 1]) << 4 | hex_digit(hex[i + 2]);
        so_buf_append_char(out, digits[bits >> 6]);
        if (i < 63)
            so_buf_append_char(out, digits[bits & 63]);
    }
    so_buf_append_c(out, "='");
}

void so_page_policy(so_buf *out) {
    so_str page = so_page();
    so_buf_append_c(out, "default-src 'none'; style-src ");
    append_hash(between(page, "<style>", "</style>"), out);
    so_buf_append_c(out, "; script-src ");
    append_hash(between(page, "<script>", "</script>"), out);
    so_buf_append_c(out,
                    "; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
                    "frame-ancestors 'none'");
}
