#!/usr/bin/env bash
# Makes a base image with Python 3.11 from Debian's packages, for machines that cannot pull images.
#
#     docker/make-base-image.sh [NAME]       NAME: pserver-base:bookworm unless told otherwise
#
# Needs root, debootstrap and a Docker daemon, takes about a minute, and does nothing if the image exists. DEBIAN_MIRROR
# names a mirror other than debootstrap's own; no mirror stays in the image.
set -euo pipefail

name="${1:-pserver-base:bookworm}"

if docker image inspect "$name" >/dev/null 2>&1; then
    echo "$name exists"
    exit 0
fi

work="$(mktemp -d "${TMPDIR:-/var/tmp}/pserver-base.XXXXXX")"
# What debootstrap may still have mounted in there is not ours to remove.
trap 'rm -rf --one-file-system "$work"' EXIT
root="$work/root"

echo "$name: debootstrap"
mirror=()
if [[ -n "${DEBIAN_MIRROR:-}" ]]; then
    mirror=("$DEBIAN_MIRROR")
fi
options=(--variant=minbase "--include=python3,python3-venv")
if ! debootstrap "${options[@]}" bookworm "$root" "${mirror[@]}" >"$work/log" 2>&1; then
    tail -n 20 "$work/log" >&2
    exit 1
fi

# The list of mirrors stays, empty: apt may be used again by whoever fills it.
: >"$root/etc/apt/sources.list"
find "$root"/var/{cache/apt,lib/apt/lists,log,tmp} "$root/tmp" -xdev -type f -delete
rm -rf "$root"/usr/share/{doc,info,locale,man}

echo "$name: docker import"
tar -C "$root" --one-file-system -c . \
    | docker import --message "Debian bookworm with Python" --change 'CMD ["python3"]' - "$name"
