#!/usr/bin/env bash
# A file system that keeps each distinct block once, in memory: a loop device over bench/deduplicating_drive.cpp, for
# `bench.hundred` with more state than there is disk.
#
#     bench/deduplicating_drive.sh begin FOLDER [GIB]    mount it at FOLDER/files, 4,096 GiB unless given
#     bench/deduplicating_drive.sh end FOLDER            unmount it, and forget all that it holds
#
# Needs root, /dev/fuse and a C++ compiler (Debian: g++ pkg-config fuse3 libfuse3-dev libxxhash-dev libzstd-dev xfsprogs).
set -euo pipefail
folder=$2
if [ "$1" = begin ]; then
    mkdir -p "$folder/drive" "$folder/files"
    g++ -O2 -march=native -std=c++17 "$(dirname "$0")/deduplicating_drive.cpp" -o "$folder/deduplicating_drive" \
        $(pkg-config --cflags --libs fuse3 libzstd) -pthread
    setsid "$folder/deduplicating_drive" "$folder/drive" "${3:-4096}" >"$folder/log" 2>&1 &
    for _ in $(seq 100); do [ -e "$folder/drive/drive" ] && break; sleep 0.1; done
    device=$(losetup --find --show --direct-io=on "$folder/drive/drive")
    mkfs.xfs -q -K "$device"
    mount -o noatime,discard "$device" "$folder/files"
elif [ "$1" = end ]; then
    device=$(findmnt -n -o SOURCE "$folder/files")
    umount "$folder/files"
    losetup -d "$device" 2>/dev/null || true # a mount of a file detaches its device itself
    umount "$folder/drive"
fi
