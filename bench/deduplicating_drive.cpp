// A file of any size that keeps each distinct 64 KiB block once, compressed, in memory. As a drive below a loop device
// it holds state that repeats itself in a thousandth of its bytes. bench/deduplicating_drive.sh mounts it.
//
// Usage: deduplicating_drive FOLDER GIB, where FOLDER is empty; the file is FOLDER/drive, and ends with the mount. Two
// blocks are one if 128 bits of a hash (XXH3) agree.
#define FUSE_USE_VERSION 31
#define XXH_INLINE_ALL
#include <fuse.h>
#include <linux/falloc.h>
#include <xxhash.h>
#include <zstd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

constexpr size_t BLOCK = 64 << 10, REQUEST = 1 << 20, LOCKS = 1024;

struct Content {
    XXH128_hash_t hash;
    size_t blocks = 1;  // that have this content
    std::string packed;
};

struct ByHash {
    size_t operator()(const XXH128_hash_t &hash) const { return hash.low64; }
    bool operator()(const XXH128_hash_t &one, const XXH128_hash_t &other) const { return XXH128_isEqual(one, other); }
};

// Contents by the first bits of their hash, so that threads seldom wait for each other.
struct Shelf {
    std::mutex lock;
    std::unordered_map<XXH128_hash_t, std::unique_ptr<Content>, ByHash, ByHash> contents;
};

static Shelf shelves[LOCKS];
static std::mutex block_locks[LOCKS];
static size_t file_nbytes;
static Content **blocks;  // null for zeros; the memory of this table exists once touched
static XXH128_hash_t zeros;

static Shelf &shelf_of(const XXH128_hash_t &hash) { return shelves[hash.high64 % LOCKS]; }

static void drop(Content *content) {
    if (!content) return;
    Shelf &shelf = shelf_of(content->hash);
    std::lock_guard<std::mutex> held(shelf.lock);
    if (!--content->blocks) shelf.contents.erase(content->hash);
}

static void unpack(const Content *content, char *block) {
    static thread_local ZSTD_DCtx *context = ZSTD_createDCtx();
    if (!content) memset(block, 0, BLOCK);
    else if (ZSTD_decompressDCtx(context, block, BLOCK, content->packed.data(), content->packed.size()) != BLOCK) abort();
}

static Content *pack(const char *block) {
    static thread_local ZSTD_CCtx *context = ZSTD_createCCtx();
    XXH128_hash_t hash = XXH3_128bits(block, BLOCK);
    if (XXH128_isEqual(hash, zeros)) return nullptr;
    Shelf &shelf = shelf_of(hash);
    std::lock_guard<std::mutex> held(shelf.lock);
    std::unique_ptr<Content> &content = shelf.contents[hash];
    if (content) {
        content->blocks++;
    } else {
        char packed[ZSTD_COMPRESSBOUND(BLOCK)];
        size_t nbytes = ZSTD_compressCCtx(context, packed, sizeof packed, block, BLOCK, 1);
        content.reset(new Content{hash, 1, std::string(packed, nbytes)});
    }
    return content.get();
}

// Calls `change(part of the block, offset in the range, bytes)` on each block of a range, with the block unpacked unless
// all of it changes, and keeps it if it `writes`.
template <class Change> static void in_blocks(off_t start, size_t size, bool writes, Change change) {
    for (size_t done = 0; done < size;) {
        size_t number = (start + done) / BLOCK, first = (start + done) % BLOCK, part = std::min(BLOCK - first, size - done);
        std::lock_guard<std::mutex> held(block_locks[number % LOCKS]);
        alignas(64) char block[BLOCK];
        if (!writes || part < BLOCK) unpack(blocks[number], block);
        change(block + first, done, part);
        if (writes) {
            Content *before = blocks[number];
            blocks[number] = pack(block);
            drop(before);
        }
        done += part;
    }
}

static bool is_drive(const char *path) { return !strcmp(path, "/drive"); }

static int get_attributes(const char *path, struct stat *found, fuse_file_info *) {
    if (!is_drive(path) && strcmp(path, "/")) return -ENOENT;
    memset(found, 0, sizeof *found);
    found->st_mode = is_drive(path) ? S_IFREG | 0600 : S_IFDIR | 0700;
    found->st_nlink = 1;
    found->st_size = is_drive(path) ? file_nbytes : 0;
    return 0;
}

static int list(const char *, void *names, fuse_fill_dir_t fill, off_t, fuse_file_info *, fuse_readdir_flags) {
    fill(names, "drive", nullptr, 0, fuse_fill_dir_flags(0));
    return 0;
}

static int open_drive(const char *path, fuse_file_info *file) {
    file->direct_io = 1;
    return is_drive(path) ? 0 : -ENOENT;
}

static int read_drive(const char *, char *memory, size_t size, off_t start, fuse_file_info *) {
    size = std::min<size_t>(size, std::max<off_t>(0, file_nbytes - start));
    in_blocks(start, size, false, [&](char *part, size_t at, size_t nbytes) { memcpy(memory + at, part, nbytes); });
    return size;
}

static int write_drive(const char *, const char *memory, size_t size, off_t start, fuse_file_info *) {
    if (start + size > file_nbytes) return -ENOSPC;
    in_blocks(start, size, true, [&](char *part, size_t at, size_t nbytes) { memcpy(part, memory + at, nbytes); });
    return size;
}

static int allocate(const char *, int mode, off_t start, off_t size, fuse_file_info *) {
    if (!(mode & (FALLOC_FL_PUNCH_HOLE | FALLOC_FL_ZERO_RANGE))) return 0;
    in_blocks(start, std::min<size_t>(size, file_nbytes - start), true,
              [&](char *part, size_t, size_t nbytes) { memset(part, 0, nbytes); });
    return 0;
}

static int synchronize(const char *, int, fuse_file_info *) { return 0; }

static void *begin(fuse_conn_info *connection, fuse_config *) {
    connection->max_write = connection->max_read = REQUEST;
    return nullptr;
}

int main(int, char **words) {
    file_nbytes = strtoull(words[2], nullptr, 10) << 30;
    blocks = static_cast<Content **>(calloc(file_nbytes / BLOCK, sizeof *blocks));
    std::vector<char> nothing(BLOCK);
    zeros = XXH3_128bits(nothing.data(), BLOCK);
    fuse_operations calls{};
    calls.getattr = get_attributes;
    calls.readdir = list;
    calls.open = open_drive;
    calls.read = read_drive;
    calls.write = write_drive;
    calls.fallocate = allocate;
    calls.fsync = synchronize;
    calls.init = begin;
    std::string options = "max_read=" + std::to_string(REQUEST);
    char *arguments[] = {words[0], words[1], const_cast<char *>("-o"), options.data(), const_cast<char *>("-f")};
    return fuse_main(5, arguments, &calls, nullptr);
}
