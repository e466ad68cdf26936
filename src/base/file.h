/* Files: mapped for reading, read whole with a limit, written all or nothing. */
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

/* Refuses directories, devices and empty files with a message that says which it was. */
int so_file_map(const char *path, so_map_file *out, so_err *err);
void so_file_unmap(so_map_file *m);
/* Gives back the memory of whole pages within [p, p + len) that lie in the mapping; reading them
 * again is possible and slow. Whether p lies in it. */
bool so_file_drop(const so_map_file *m, const void *p, size_t len);

/* Whole file into `out` (appended), at most max_bytes. "-" is standard input. */
int so_file_read(const char *path, size_t max_bytes, so_buf *out, so_err *err);

bool so_file_is_dir(const char *path);
bool so_file_exists(const char *path);
/* Of a regular file; 0 where it is none. */
size_t so_file_bytes(const char *path);

/* dir/name, with one slash; caller frees. */
char *so_path_join(const char *dir, const char *name);

/* Creates the folder and its parents. */
int so_dir_create(const char *path, so_err *err);

/* The names in a folder but for . and .., sorted; where there are more than `cap`, any of them. */
typedef struct so_dir_names {
    char **names;
    int n;
} so_dir_names;
int so_dir_list(const char *path, int cap, so_dir_names *out, so_err *err);
void so_dir_names_free(so_dir_names *d);

/* The folder of the running program, NULL where it cannot be told. Caller frees. */
char *so_path_program_dir(void);

/* A file written beside its target and renamed onto it at commit, so that an interrupted or failed
 * write leaves nothing behind and never harms an existing file. Devices and pipes are written to.
 */
typedef struct so_out_file so_out_file;
int so_out_begin(const char *path, so_out_file **out, so_err *err);
int so_out_write(so_out_file *f, const void *p, size_t len, so_err *err);
uint64_t so_out_tell(const so_out_file *f);
int so_out_commit(so_out_file *f, so_err *err); /* frees f also on failure */
void so_out_abort(so_out_file *f);              /* NULL is fine */

/* Removes what unfinished so_out_files have left; safe in a signal handler. */
void so_out_cleanup_on_signal(void);

#endif
