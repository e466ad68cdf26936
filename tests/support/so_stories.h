/* The stories260K checkpoint of llama2.c (shared material) as a GGUF file with its tokenizer: a
 * real model of 1 MB that tells stories, for tests that want sense instead of noise. */
#ifndef SO_STORIES_H
#define SO_STORIES_H

/* Writes dir/stories260K.gguf (float32); the path, to be freed, or NULL where the shared material
 * is absent. Fails the test on any other error. */
char *so_stories_write(const char *dir);

#endif
