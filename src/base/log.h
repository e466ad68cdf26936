/* Logging: one line per event on stderr, filtered by level. The level and the hook are process-wide
 * (two of the few mutable globals). */
#ifndef SO_BASE_LOG_H
#define SO_BASE_LOG_H

typedef enum so_log_level {
    SO_LOG_ERROR,
    SO_LOG_WARN,
    SO_LOG_INFO,
    SO_LOG_DEBUG,
} so_log_level;

void so_log_set_level(so_log_level level); /* SO_LOG_WARN at start */
/* Sets a function that runs before every log line, or NULL for none. The code that draws on the
 * terminal uses it to end its own line first, so that a log line never starts in the middle of
 * other text. Call it only while no other thread logs. */
void so_log_set_hook(void (*fn)(void *user), void *user);
void so_log(so_log_level level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#endif
