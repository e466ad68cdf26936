/* SHA-256 against the vectors of FIPS 180-4 and NIST's million-letter message. */
#include "so_test.h"

#include "base/sha256.h"

static void expect(const char *text, size_t len, size_t step, const char *want) {
    so_sha256 s;
    char hex[65];
    so_sha256_init(&s);
    for (size_t i = 0; i < len; i += step)
        so_sha256_add(&s, text + i, len - i < step ? len - i : step);
    so_sha256_hex(&s, hex);
    assert_string_equal(hex, want);
}

static void test_vectors(void **state) {
    (void)state;
    static const char two[] = "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
    expect("", 0, 1, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    expect("abc", 3, 3, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    expect(two, sizeof two - 1, 100,
           "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
}

static void test_million_in_odd_steps(void **state) {
    (void)state;
    static char a[1000000];
    memset(a, 'a', sizeof a);
    static const char want[] = "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0";
    expect(a, sizeof a, 63, want);
    expect(a, sizeof a, 65, want);
    expect(a, sizeof a, sizeof a, want);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_vectors),
        cmocka_unit_test(test_million_in_odd_steps),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
