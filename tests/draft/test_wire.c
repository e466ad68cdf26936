/* Messages of draft workers: what is written reads the same; what is cut, changed or random is refused
 * or is a message, never read past its end, and a message has one form in bytes. */
#include "so_test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/rng.h"
#include "draft/wire.h"

typedef struct dice {
    uint64_t seed;
    uint32_t n;
} dice;

static int below(dice *d, int n) {
    so_rng_key key = {.seed = d->seed, .purpose = SO_RNG_TEST};
    return (int)(so_rng_uniform(&key, d->n++) * n);
}
static float unit(dice *d) { return (float)below(d, 1 << 20) / (1 << 20); }
static uint64_t u64(dice *d) {
    uint64_t v = 0;
    for (int i = 0; i < 4; i++)
        v = v << 16 | (uint64_t)below(d, 1 << 16);
    return v;
}

static so_wire_msg *a, *b;
static unsigned char *bytes, *again;

static int open_all(void **state) {
    (void)state;
    a = SO_NEW(so_wire_msg);
    b = SO_NEW(so_wire_msg);
    bytes = so_alloc(SO_WIRE_BYTES);
    again = so_alloc(SO_WIRE_BYTES);
    return 0;
}

static int close_all(void **state) {
    (void)state;
    free(a);
    free(b);
    free(bytes);
    free(again);
    return 0;
}

static const so_wire_type TYPES[] = {
    SO_WIRE_HELLO,    SO_WIRE_OPEN,  SO_WIRE_TEXT,    SO_WIRE_JOB,     SO_WIRE_STOP,
    SO_WIRE_BYE,      SO_WIRE_CLOSE, SO_WIRE_WELCOME, SO_WIRE_REFUSED, SO_WIRE_ALIVE,
    SO_WIRE_OUTCOMES, SO_WIRE_LEVEL, SO_WIRE_DONE};

static void fill_request(dice *d, so_wire_msg *m) {
    m->open = (so_wire_open){.request = (uint32_t)below(d, 1 << 30), .max_tokens = 100};
    m->open.n_prompt = below(d, 101);
    so_sample_defaults(&m->open.sample);
    m->open.sample.temp = unit(d);
    m->open.sample.seed = u64(d);
    m->n_tokens = below(d, 50);
    m->n_biases = below(d, 5);
    for (int i = 0; i < m->n_tokens; i++)
        m->tokens[i] = below(d, 1 << 30) - (1 << 29);
    for (int i = 0; i < m->n_biases; i++)
        m->biases[i] = (so_bias){below(d, 1000), i ? unit(d) : -INFINITY};
    m->text = (so_wire_text){m->open.request, below(d, 1000)};
}

static void fill_rounds(dice *d, so_wire_msg *m) {
    m->job = (so_wire_job){.batch = m->batch,
                           .depth = 1 + below(d, SO_AHEAD_DEPTH),
                           .fan = below(d, SO_AHEAD_OUTCOMES + 1),
                           .left_ms = unit(d)};
    so_async_estimates_init(&m->job.estimates);
    for (int i = 0; i < m->n_jobs; i++) {
        so_wire_round *r = &m->rounds[i];
        *r = (so_wire_round){(uint32_t)i, 1 + below(d, 500), 1 + below(d, SO_TREE_MAX), {{0}}};
        for (int k = 0; k < r->n_nodes; k++)
            r->nodes[k] = (so_wire_node){below(d, 1000), k ? below(d, k) : -1, unit(d)};
    }
}

static void fill_fans(dice *d, so_wire_msg *m) {
    for (int i = 0; i < m->n_jobs; i++) {
        so_wire_fan *f = &m->fans[i];
        memset(f, 0, sizeof *f);
        f->n_nodes = below(d, SO_AHEAD_NODES + 1);
        for (int k = 0; k < f->n_nodes; k++) {
            f->n_candidates[k] = below(d, SO_AHEAD_CANDIDATES + 1);
            for (int c = 0; c < f->n_candidates[k]; c++)
                f->candidates[k][c] = (so_ahead_candidate){100 * c + below(d, 100), unit(d)};
            if (f->n_candidates[k] > 0 && f->n_outcomes < SO_AHEAD_OUTCOMES) {
                f->outcomes[f->n_outcomes].node = k;
                f->outcomes[f->n_outcomes].candidate = below(d, f->n_candidates[k]);
                f->outcomes[f->n_outcomes++].chance = unit(d);
            }
        }
        so_wire_guesses *g = &m->guesses[i];
        memset(g, 0, sizeof *g);
        g->n = below(d, SO_AHEAD_OUTCOMES + 1);
        for (int k = 0; k < g->n; k++) {
            g->at[k].token = below(d, 1000) - 1;
            g->at[k].confidence = unit(d);
        }
    }
}

/* A valid message of this type. */
static void fill(dice *d, so_wire_type type, so_wire_msg *m) {
    m->type = type;
    m->session = u64(d);
    m->number = (uint32_t)below(d, 1 << 30);
    m->hello = (so_wire_hello){.vocab_hash = u64(d),
                               .draft_id = u64(d),
                               .limits = so_wire_limits(),
                               .n_vocab = 1 + below(d, 200000),
                               .d_model = 1 + below(d, 5000),
                               .n_ctx = 1 + below(d, 100000),
                               .n_parallel = 1 + below(d, 100),
                               .max_draft = 1 + below(d, 16),
                               .encoder = below(d, 2)};
    m->welcome = (so_wire_welcome){u64(d), u64(d), 1 + below(d, 1000), 1 + below(d, 100)};
    m->refused.why = (so_wire_refusal)(SO_WIRE_LOST + below(d, 4));
    memset(m->refused.text, 0, sizeof m->refused.text);
    for (int i = 0, n = below(d, SO_WIRE_REASON); i < n; i++)
        m->refused.text[i] = (char)(' ' + below(d, 95));
    m->request = (uint32_t)below(d, 1 << 30);
    m->batch = (uint32_t)below(d, 1 << 30);
    m->busy_us = (uint32_t)below(d, 1 << 30);
    m->level = 1 + below(d, SO_AHEAD_DEPTH);
    m->n_jobs = 1 + below(d, 6);
    fill_request(d, m);
    fill_rounds(d, m);
    fill_fans(d, m);
}

static void same_fields(const so_wire_msg *x, const so_wire_msg *y) {
    assert_int_equal(x->type, y->type);
    assert_true(x->session == y->session);
    assert_int_equal(x->number, y->number);
    if (x->type == SO_WIRE_HELLO) {
        assert_true(x->hello.vocab_hash == y->hello.vocab_hash);
        assert_int_equal(x->hello.n_parallel, y->hello.n_parallel);
        assert_int_equal(x->hello.encoder, y->hello.encoder);
    } else if (x->type == SO_WIRE_REFUSED) {
        assert_int_equal(x->refused.why, y->refused.why);
        assert_string_equal(x->refused.text, y->refused.text);
    } else if (x->type == SO_WIRE_TEXT) {
        assert_int_equal(x->text.at, y->text.at);
        assert_int_equal(x->n_tokens, y->n_tokens);
        assert_memory_equal(x->tokens, y->tokens, (size_t)x->n_tokens * sizeof *x->tokens);
    } else if (x->type == SO_WIRE_JOB) {
        assert_int_equal(x->job.batch, y->job.batch);
        assert_memory_equal(&x->job.estimates, &y->job.estimates, sizeof x->job.estimates);
        for (int i = 0; i < x->n_jobs; i++)
            assert_memory_equal(x->rounds[i].nodes, y->rounds[i].nodes,
                                (size_t)x->rounds[i].n_nodes * sizeof *x->rounds[i].nodes);
    } else if (x->type == SO_WIRE_OUTCOMES) {
        for (int i = 0; i < x->n_jobs; i++) {
            assert_int_equal(x->fans[i].n_nodes, y->fans[i].n_nodes);
            assert_int_equal(x->fans[i].n_outcomes, y->fans[i].n_outcomes);
            assert_memory_equal(x->fans[i].outcomes, y->fans[i].outcomes,
                                (size_t)x->fans[i].n_outcomes * sizeof *x->fans[i].outcomes);
        }
    } else if (x->type == SO_WIRE_LEVEL) {
        assert_int_equal(x->level, y->level);
        assert_int_equal(x->busy_us, y->busy_us);
        assert_memory_equal(x->guesses[0].at, y->guesses[0].at,
                            (size_t)x->guesses[0].n * sizeof *x->guesses[0].at);
    }
}

static void what_is_written_reads_the_same(void **state) {
    dice d = {.seed = 1};
    so_err err = {0};
    (void)state;
    for (int k = 0; k < 60; k++)
        for (size_t t = 0; t < SO_LEN(TYPES); t++) {
            fill(&d, TYPES[t], a);
            size_t n = so_wire_write(a, bytes);
            assert_true(n >= SO_WIRE_HEAD && n <= SO_WIRE_BYTES);
            SO_OK_OR_FAIL(so_wire_read(bytes, n, b, &err), err);
            same_fields(a, b);
            assert_int_equal(so_wire_write(b, again), n);
            assert_memory_equal(bytes, again, n);
        }
}

/* From a copy of exactly this size, so that the address sanitizer sees a read past the end. */
static int read_copy(const unsigned char *p, size_t n) {
    unsigned char *copy = so_alloc(n);
    so_err err = {0};
    memcpy(copy, p, n);
    int rc = so_wire_read(copy, n, b, &err);
    free(copy);
    assert_true(rc == SO_OK || err.msg[0] != '\0');
    return rc;
}

static void a_part_of_a_message_is_refused(void **state) {
    dice d = {.seed = 2};
    (void)state;
    for (size_t t = 0; t < SO_LEN(TYPES); t++) {
        fill(&d, TYPES[t], a);
        size_t n = so_wire_write(a, bytes);
        for (size_t k = 0; k < n; k = k < 64 || n - k < 64 ? k + 1 : k + 29)
            assert_true(read_copy(bytes, k) != SO_OK);
        bytes[n] = 0;
        assert_true(read_copy(bytes, n + 1) != SO_OK);
        /* The same with a length that fits. */
        for (size_t k = SO_WIRE_HEAD; k < n; k = n - k < 64 ? k + 1 : k + 29) {
            uint32_t len = (uint32_t)(k - SO_WIRE_HEAD);
            memcpy(bytes + 24, &len, 4);
            assert_true(read_copy(bytes, k) != SO_OK);
        }
    }
}

/* Any change is refused, or gives a message that is written as it was read. */
static void changed_bytes_are_refused_or_a_message(void **state) {
    dice d = {.seed = 3};
    int n_read = 0, n_refused = 0;
    (void)state;
    for (int k = 0; k < 20000; k++) {
        fill(&d, TYPES[below(&d, (int)SO_LEN(TYPES))], a);
        size_t n = so_wire_write(a, bytes);
        for (int i = 1 + below(&d, 3); i > 0; i--) {
            int at = below(&d, (int)(below(&d, 2) ? n : SO_MIN(n, (size_t)80)));
            bytes[at] = (unsigned char)(below(&d, 3) ? below(&d, 256) : below(&d, 2) * 255);
        }
        if (read_copy(bytes, n) != SO_OK) {
            n_refused++;
            continue;
        }
        n_read++;
        assert_int_equal(so_wire_write(b, again), n);
        assert_memory_equal(bytes, again, n);
    }
    assert_true(n_read > 100 && n_refused > 1000);
}

static void random_bytes_are_refused(void **state) {
    dice d = {.seed = 4};
    (void)state;
    for (int k = 0; k < 20000; k++) {
        size_t n = (size_t)below(&d, 400);
        fill(&d, TYPES[below(&d, (int)SO_LEN(TYPES))], a);
        size_t valid = so_wire_write(a, again);
        for (size_t i = 0; i < n; i++)
            bytes[i] = (unsigned char)below(&d, 256);
        if (k % 2 && n >= SO_WIRE_HEAD) { /* behind a valid head */
            uint32_t len = (uint32_t)(n - SO_WIRE_HEAD);
            memcpy(bytes, again, SO_MIN(valid, (size_t)SO_WIRE_HEAD));
            memcpy(bytes + 24, &len, 4);
        }
        if (read_copy(bytes, n) == SO_OK)
            assert_true(b->type == SO_WIRE_ALIVE || b->type == SO_WIRE_BYE ||
                        b->type == SO_WIRE_STOP || b->type == SO_WIRE_DONE ||
                        b->type == SO_WIRE_CLOSE || b->type == SO_WIRE_TEXT);
    }
}

/* Versions, lengths and counts, each with a message that says so. */
static void refusals_name_the_field(void **state) {
    dice d = {.seed = 5};
    so_err err = {0};
    uint32_t v = 7;
    (void)state;
    fill(&d, SO_WIRE_LEVEL, a);
    size_t n = so_wire_write(a, bytes);
    memcpy(bytes + 4, &v, 4);
    assert_int_equal(so_wire_read(bytes, n, b, &err), SO_EUNSUPPORTED);
    assert_non_null(strstr(err.msg, "version 7"));
    n = so_wire_write(a, bytes);
    v = UINT32_MAX;
    memcpy(bytes + 24, &v, 4);
    assert_int_equal(so_wire_read(bytes, n, b, &err), SO_EFORMAT);
    assert_non_null(strstr(err.msg, "states a length"));
    assert_int_equal(so_wire_read(bytes, (size_t)4 << 30, b, &err), SO_EFORMAT);
    assert_non_null(strstr(err.msg, "at most"));
    n = so_wire_write(a, bytes);
    v = 1 << 30;
    memcpy(bytes + SO_WIRE_HEAD + 12, &v, 4); /* the number of requests */
    assert_int_equal(so_wire_read(bytes, n, b, &err), SO_EFORMAT);
    assert_non_null(strstr(err.msg, "n_jobs"));
    a->guesses[0].n = 1;
    a->guesses[0].at[0].confidence = NAN;
    assert_int_equal(so_wire_write(a, bytes), 0);
    fill(&d, SO_WIRE_OUTCOMES, a);
    a->fans[0].n_nodes = 1;
    a->fans[0].n_candidates[0] = 2;
    a->fans[0].candidates[0][0] = a->fans[0].candidates[0][1] = (so_ahead_candidate){9, 0.5f};
    assert_int_equal(so_wire_write(a, bytes), 0); /* two drafts for one outcome */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_written_reads_the_same),
        cmocka_unit_test(a_part_of_a_message_is_refused),
        cmocka_unit_test(changed_bytes_are_refused_or_a_message),
        cmocka_unit_test(random_bytes_are_refused),
        cmocka_unit_test(refusals_name_the_field),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}
