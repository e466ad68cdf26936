/* Messages are kept as JSON, the form that chat templates and saved files use.
 *
 * Invariant: the system message is separate and always visible. All other messages are by user or
 * assistant and in the order in which they were added; the template decides whether that order is
 * valid. Messages that no longer fit the context are hidden and never deleted, so that a saved
 * conversation is complete. Main thread only. */
#include "cli/dialog.h"

#include <stdlib.h>

#include "base/file.h"
#include "token/utf8.h"

enum { MAX_FILE_BYTES = 64 << 20, MAX_MESSAGES = 100000 };

void so_dialog_free(so_dialog *d) {
    json_decref(d->system);
    json_decref(d->messages);
    *d = (so_dialog){0};
}

void so_dialog_clear(so_dialog *d) {
    json_decref(d->messages);
    d->messages = NULL;
    d->first = 0;
}

static int make_message(const char *role, so_str text, json_t **out, so_err *err) {
    size_t ok = so_utf8_valid_len(text);
    if (ok != text.len)
        return so_err_set(err, SO_EINVAL,
                          "the %s is not valid UTF-8: byte 0x%02X at offset %zu (`sooth run --raw` "
                          "accepts any bytes)",
                          strcmp(role, "user") == 0 ? "prompt" : role, (unsigned char)text.ptr[ok],
                          ok);
    *out = json_pack("{s:s, s:o}", "role", role, "content", json_stringn(text.ptr, text.len));
    return *out ? SO_OK : so_err_set(err, SO_ENOMEM, "no memory for a message");
}

int so_dialog_add(so_dialog *d, const char *role, so_str text, so_err *err) {
    json_t *m = NULL;
    int rc = make_message(role, text, &m, err);
    if (rc != SO_OK)
        return rc;
    d->messages = d->messages ? d->messages : json_array();
    json_array_append_new(d->messages, m);
    return SO_OK;
}

int so_dialog_set_system(so_dialog *d, so_str text, so_err *err) {
    json_t *m = NULL;
    int rc = text.len ? make_message("system", text, &m, err) : SO_OK;
    if (rc != SO_OK)
        return rc;
    json_decref(d->system);
    d->system = m;
    return SO_OK;
}

static so_str content(const json_t *message) {
    const json_t *text = json_object_get(message, "content");
    return text ? (so_str){json_string_value(text), json_string_length(text)} : SO_STR("");
}

so_str so_dialog_system(const so_dialog *d) { return content(d->system); }
size_t so_dialog_len(const so_dialog *d) { return json_array_size(d->messages); }

static const json_t *last(const so_dialog *d) {
    size_t n = so_dialog_len(d);
    return n ? json_array_get(d->messages, n - 1) : NULL;
}

static bool has_role(const json_t *message, const char *role) {
    const char *is = json_string_value(json_object_get(message, "role"));
    return is && strcmp(is, role) == 0;
}

bool so_dialog_ends_with(const so_dialog *d, const char *role) { return has_role(last(d), role); }
so_str so_dialog_last(const so_dialog *d) { return content(last(d)); }

void so_dialog_pop(so_dialog *d) {
    size_t n = so_dialog_len(d);
    if (n == 0)
        return;
    json_array_remove(d->messages, n - 1);
    if (d->first >= n - 1)
        d->first = 0; /* no visible message is left: show the hidden ones again */
}

bool so_dialog_hide_oldest(so_dialog *d) {
    size_t n = so_dialog_len(d), i = d->first + 1;
    while (i < n && !has_role(json_array_get(d->messages, i), "user"))
        i++;
    if (i >= n)
        return false;
    d->first = i;
    return true;
}

int so_dialog_encode(const so_dialog *d, const so_chat *chat, so_tokens *out, so_err *err) {
    json_t *seen = json_array();
    if (d->system)
        json_array_append(seen, d->system);
    for (size_t i = d->first; i < so_dialog_len(d); i++)
        json_array_append(seen, json_array_get(d->messages, i));
    int rc = so_chat_encode(chat, seen, NULL, out, err);
    json_decref(seen);
    return rc;
}

/* --- files --- */

int so_dialog_save(const so_dialog *d, const char *path, so_err *err) {
    so_out_file *f = NULL;
    json_t *list = json_array();
    if (d->system)
        json_array_append(list, d->system);
    if (d->messages)
        json_array_extend(list, d->messages);
    json_t *o = json_pack("{s:o}", "messages", list);
    char *text = json_dumps(o, JSON_INDENT(2));
    json_decref(o);
    if (!text)
        return so_err_set(err, SO_ENOMEM, "%s: no memory to write the conversation", path);
    int rc = so_out_begin(path, &f, err);
    if (rc == SO_OK) {
        rc = so_out_write(f, text, strlen(text), err);
        if (rc == SO_OK)
            rc = so_out_write(f, "\n", 1, err);
        if (rc == SO_OK)
            rc = so_out_commit(f, err);
        else
            so_out_abort(f);
    }
    free(text);
    return rc;
}

static int check_message(const json_t *m, size_t i, const char *path, so_err *err) {
    const char *role = json_string_value(json_object_get(m, "role"));
    if (!role || !json_is_string(json_object_get(m, "content")))
        return so_err_set(err, SO_EFORMAT,
                          "%s: message %zu: must be an object with the texts \"role\" and "
                          "\"content\"",
                          path, i + 1);
    bool system = strcmp(role, "system") == 0;
    if (system && i > 0)
        return so_err_set(err, SO_EFORMAT, "%s: message %zu: a system message must be the first",
                          path, i + 1);
    if (!system && strcmp(role, "user") != 0 && strcmp(role, "assistant") != 0)
        return so_err_set(err, SO_EFORMAT,
                          "%s: message %zu: role '%.40s' must be system, user or assistant", path,
                          i + 1, role);
    return SO_OK;
}

static int take_messages(const json_t *list, const char *path, so_dialog *out, so_err *err) {
    size_t n = json_array_size(list);
    int rc = SO_OK;
    if (!json_is_array(list) || n > MAX_MESSAGES)
        return so_err_set(err, SO_EFORMAT,
                          "%s: must be {\"messages\": […]} or a list of messages, at most %d", path,
                          MAX_MESSAGES);
    for (size_t i = 0; i < n && rc == SO_OK; i++) {
        const json_t *m = json_array_get(list, i);
        rc = check_message(m, i, path, err);
        if (rc == SO_OK && has_role(m, "system"))
            rc = so_dialog_set_system(out, content(m), err);
        else if (rc == SO_OK)
            rc = so_dialog_add(out, has_role(m, "user") ? "user" : "assistant", content(m), err);
    }
    return rc;
}

int so_dialog_load(so_dialog *d, const char *path, so_err *err) {
    so_buf text = {.max = MAX_FILE_BYTES};
    so_dialog fresh = {0};
    json_error_t je;
    int rc = so_file_read(path, MAX_FILE_BYTES, &text, err);
    if (rc != SO_OK)
        goto out;
    json_t *o = json_loadb(so_buf_str(&text).ptr, text.len, JSON_ALLOW_NUL, &je);
    if (!o)
        rc = so_err_set(err, SO_EFORMAT, "%s: line %d: %s", path, je.line, je.text);
    else
        rc =
            take_messages(json_is_array(o) ? o : json_object_get(o, "messages"), path, &fresh, err);
    json_decref(o);
    if (rc == SO_OK) {
        so_dialog_free(d);
        *d = fresh;
    } else {
        so_dialog_free(&fresh);
    }
out:
    so_buf_free(&text);
    return rc;
}
