#!/bin/sh
# deb.sh VERSION DEB_VERSION: builds the Debian packages into build/deb (called by `make deb`).
#
# Copies packaging/debian to build/deb/work/debian, fills in version, date and maintainer, and runs debian/rules there.
# Needs no root and no fakeroot: files in the packages belong to root by dpkg-deb --root-owner-group. The maintainer is
# DEBFULLNAME <DEBEMAIL>, as for Debian's own tools, else git's user. The date is that of the last commit, so that the same
# tree gives the same packages.
set -eu
cd "$(dirname "$0")/.."
. tools/packages.sh
for tool in dh dpkg-buildflags; do
    command -v "$tool" >/dev/null || {
        echo "make deb needs Debian packages that are missing; install them with: apt-get install $DEB_PACKAGES" >&2
        exit 1
    }
done
root=$PWD out=$PWD/build/deb
name=${DEBFULLNAME:-$(git config user.name || echo "sooth maintainers")}
mail=${DEBEMAIL:-$(git config user.email || echo "root@localhost")}
stamp=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || date +%s)}

rm -rf "$out"
mkdir -p "$out/work"
cp -r packaging/debian "$out/work/debian"
cd "$out/work"
for file in control changelog; do
    sed -e "s|@VERSION@|$2|; s|@UPSTREAM@|$1|; s|@MAINTAINER@|$name <$mail>|" \
        -e "s|@DATE@|$(date -u -R -d "@$stamp")|" "debian/$file.in" >"debian/$file"
    rm "debian/$file.in"
done
ROOT=$root JOBS=$(nproc) DEB_RULES_REQUIRES_ROOT=no DEB_BUILD_OPTIONS=noautodbgsym SOURCE_DATE_EPOCH=$stamp \
    env -u MAKEFLAGS -u MFLAGS -u MAKELEVEL debian/rules binary >"$out/build.log" 2>&1 || {
    tail -40 "$out/build.log" >&2
    exit 1
}
cd "$root"
ls -1 build/deb/*.deb
