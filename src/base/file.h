/* Files: memory-mapped for reading, read whole up to a limit, written atomically (complete or not
 * at all). */
#ifndef SO_BASE_FILE_H
#define SO_BASE_FILE_H

#include "base/err.h"
#include "base/str.h"

/* A read-only mapping of a whole regular file. */
typedef struct so_map_file {
    const unsigned char *data;
    size_t len;
    char *path;
} so_map_file;

/* Rejects directories, devices and empty files; the message names the reason. */
int so_file_map(const char *path, so_map_file *out, so_err *err);
void so_file_unmap(so_map_file *m);
/* Releases the physical memory of the whole pages inside [p, p + len). The bytes stay readable but
 * come from disk again. Returns false, and does nothing, if the range is not in the mapping. */
bool so_file_drop(const so_map_file *m, const void *p, size_t len);

/* Appends the whole file to `out`; an error if it is longer than max_bytes. "-" is standard input.
 */
int so_file_read(const char *path, size_t max_bytes, so_buf *out, so_err *err);

bool so_file_is_dir(const char *path);
bool so_file_exists(const char *path);
/* Size of a regular file; 0 if the path is anything else. */
size_t so_file_bytes(const char *path);

/* dir/name with exactly one slash between them. Caller frees. */
char *so_path_join(const char *dir, const char *name);

/* Creates the folder and its parents. */
int so_dir_create(const char *path, so_err *err);

/* The names in a folder, sorted, without "." and "..". At most `cap` of them; if there are more, an
 * arbitrary subset. */
typedef struct so_dir_names {
    char **names;
    int n;
} so_dir_names;
int so_dir_list(const char *path, int cap, so_dir_names *out, so_err *err);
void so_dir_names_free(so_dir_names *d);

/* The folder of the running program, or NULL if it cannot be determined. Caller frees. */
char *so_path_program_dir(void);

/* An output file. It is written under a temporary name in the target's folder and renamed onto the
 * target at commit, so a failed or interrupted write leaves no file behind and never damages an
 * existing one. Devices and pipes are written in place. */
typedef struct so_out_file so_out_file;
int so_out_begin(const char *path, so_out_file **out, so_err *err);
int so_out_write(so_out_file *f, const void *p, size_t len, so_err *err);
uint64_t so_out_tell(const so_out_file *f);
int so_out_commit(so_out_file *f, so_err *err); /* frees f, also on failure */
void so_out_abort(so_out_file *f);              /* f may be NULL */
/* Writes a whole file: begin, write, commit. */
int so_out_put(const char *path, const void *p, size_t len, so_err *err);

/* Removes the temporary files of all unfinished so_out_files. Async-signal-safe. */
void so_out_cleanup_on_signal(void);

#endif
