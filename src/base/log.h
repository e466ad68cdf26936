/* One line per event on stderr, filtered by a level. The level is one of the two mutable globals.
 */
#ifndef SO_BASE_LOG_H
#define SO_BASE_LOG_H

typedef enum so_log_level {
    SO_LOG_ERROR,
    SO_LOG_WARN,
    SO_LOG_INFO,
    SO_LOG_DEBUG,
} so_log_level;

void so_log_set_level(so_log_level level); /* SO_LOG_WARN at start */
void so_log(so_log_level level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#endif
