#!/usr/bin/env bash
# A file system for state that repeats itself: a loop device over a file whose blocks are kept in memory, those of one
# content once (bench/repeating_store.cpp), for `bench.hundred` with more state than there is disk.
#
#     bench/repeating_store.sh begin FOLDER [GIB]    mount it at FOLDER/files, 4,096 GiB unless given
#     bench/repeating_store.sh end FOLDER            unmount it, and forget all that it holds
#
# Needs root, /dev/fuse and a C++ compiler (Debian: g++ pkg-config fuse3 libfuse3-dev libxxhash-dev libzstd-dev xfsprogs).
set -euo pipefail
folder=$2
if [ "$1" = begin ]; then
    mkdir -p "$folder/drive" "$folder/files"
    g++ -O2 -march=native -std=c++17 "$(dirname "$0")/repeating_store.cpp" -o "$folder/repeating_store" \
        $(pkg-config --cflags --libs fuse3 libzstd) -pthread
    setsid "$folder/repeating_store" "$folder/drive" "${3:-4096}" >"$folder/log" 2>&1 &
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
