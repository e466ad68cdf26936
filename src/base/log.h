/* One line per event on stderr, filtered by a level. The level, and what runs before a line, are
 * among the few mutable globals. */
#ifndef SO_BASE_LOG_H
#define SO_BASE_LOG_H

typedef enum so_log_level {
    SO_LOG_ERROR,
    SO_LOG_WARN,
    SO_LOG_INFO,
    SO_LOG_DEBUG,
} so_log_level;

void so_log_set_level(so_log_level level); /* SO_LOG_WARN at start */
/* fn runs before every line that is written: it can see to it that the line does not begin in the
 * middle of other text on the same terminal. NULL: nothing. For whoever owns the terminal; set
 * while no other thread logs. */
void so_log_set_before(void (*fn)(void *user), void *user);
void so_log(so_log_level level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#endif
