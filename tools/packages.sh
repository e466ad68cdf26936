# Sourced by demo.sh, test.sh and the Makefile: the Debian packages that sooth needs, and how to install them.

# need PACKAGE… : installs the packages that are missing and prints their names.
need() {
    missing=""
    for p in "$@"; do
        dpkg-query -W -f '${db:Status-Status}' "$p" 2>/dev/null | grep -qx installed || missing="$missing $p"
    done
    [ -z "$missing" ] && return 0
    command -v apt-get >/dev/null || {
        echo "sooth: these packages are needed, but there is no apt-get to install them:$missing" >&2
        return 1
    }
    sudo=""
    if [ "$(id -u)" -ne 0 ]; then
        command -v sudo >/dev/null || {
            echo "sooth: run as root, or install these packages yourself:$missing" >&2
            return 1
        }
        sudo=sudo
    fi
    echo "sooth: installing$missing" >&2
    export DEBIAN_FRONTEND=noninteractive
    $sudo apt-get update -qq || true
    # shellcheck disable=SC2086
    $sudo apt-get install -y -qq --no-install-recommends $missing >/dev/null
}

BUILD_PACKAGES="gcc libc6-dev make pkg-config libpcre2-dev libutf8proc-dev libjansson-dev libedit-dev"

# missing_for_build CC PKG_CONFIG ARCH : prints the packages without which make cannot work, on one line. Libraries count
# as missing if pkg-config does not find them, so that libraries installed from source are accepted.
missing_for_build() {
    suffix=""
    case "$3" in
    "$(uname -m)") ;;
    aarch64) suffix=":arm64" ;;
    esac
    absent=""
    command -v "${1%% *}" >/dev/null || case "$1" in
    clang*) absent="clang" ;;
    aarch64-linux-gnu-gcc*) absent="gcc-aarch64-linux-gnu libc6-dev-arm64-cross" ;;
    *) absent="gcc libc6-dev" ;;
    esac
    command -v pkg-config >/dev/null || absent="$absent pkg-config"
    for pair in libpcre2-8=libpcre2-dev libutf8proc=libutf8proc-dev jansson=libjansson-dev \
        libedit=libedit-dev; do
        eval "$2 --exists ${pair%=*}" 2>/dev/null || absent="$absent ${pair#*=}$suffix"
    done
    echo $absent
}

PULL_PACKAGES="python3 python3-pip ca-certificates"
DEB_PACKAGES="debhelper dpkg-dev"
TEST_PACKAGES="libcmocka-dev libzmq5 python3 xz-utils git curl prometheus"

# The cross compiler, the emulator and the libraries for make check-arm.
need_arm() {
    if ! dpkg --print-foreign-architectures | grep -qx arm64; then
        sudo=""
        [ "$(id -u)" -eq 0 ] || sudo=sudo
        $sudo dpkg --add-architecture arm64
        $sudo apt-get update -qq || true
    fi
    need gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user \
        libpcre2-dev:arm64 libutf8proc-dev:arm64 libjansson-dev:arm64 libedit-dev:arm64 libcmocka-dev:arm64
}
