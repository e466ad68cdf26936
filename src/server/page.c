/* The page at /: web/index.html as it is, put into the program by the assembler. One file, no
 * resources from elsewhere, so there is nothing to keep together at run time. */
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
