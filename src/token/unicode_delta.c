/* Binary search in the sorted ranges of the generated unicode_tables.h. Ids must equal those of
 * Hugging Face tokenizers for every character, so the tables follow the Unicode versions of that
 * library, not the newest. */
#include "token/unicode_delta.h"

#include "base/mem.h"
#include "token/unicode_tables.h"

/* The index of the first range that does not end before cp. */
#define FIRST_NOT_BEFORE(table, cp, out)     \
    do {                                     \
        size_t lo_ = 0, hi_ = SO_LEN(table); \
        while (lo_ < hi_) {                  \
            size_t mid_ = (lo_ + hi_) / 2;   \
            if ((cp) > (table)[mid_][1])     \
                lo_ = mid_ + 1;              \
            else                             \
                hi_ = mid_;                  \
        }                                    \
        (out) = lo_;                         \
    } while (0)

uint32_t so_unicode_stand_in(uint32_t cp) {
    size_t i;
    if (cp < unicode_stand_ins[0][0])
        return 0;
    FIRST_NOT_BEFORE(unicode_stand_ins, cp, i);
    return i < SO_LEN(unicode_stand_ins) && cp >= unicode_stand_ins[i][0] ? unicode_stand_ins[i][2]
                                                                          : 0;
}

bool so_unicode_not_normalized(uint32_t cp) {
    size_t i;
    if (cp < unicode_not_normalized[0][0])
        return false;
    FIRST_NOT_BEFORE(unicode_not_normalized, cp, i);
    return i < SO_LEN(unicode_not_normalized) && cp >= unicode_not_normalized[i][0];
}
