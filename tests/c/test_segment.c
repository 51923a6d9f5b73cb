/* segment.c: layouts, memory that is really there, mappings. It is included whole, to reach its private parts. */
#include "../../pynccl/host/src/segment.c"

#include "parts.h"

SCENE(sections_of_every_layout_are_whole_pages_one_after_another) {
  for (int n = 1; n <= MAX_RANKS; n++) {
    struct layout at = layout_of(n);
    size_t pairs = (size_t)n * n;
    size_t starts[] = {0, at.lines, at.channels, at.signals, at.small, at.ahead, at.stage, at.p2p, at.total};
    size_t sizes[] = {sizeof(struct segment_head),  n * sizeof(struct rank_lines), pairs * sizeof(struct channel), pairs * sizeof(struct signals),
                      n * 2 * (size_t)ONE_SHOT_BYTES, n * AHEAD * at.ahead_bytes, n * at.ring, pairs * P2P_SLOTS * at.p2p_chunk};
    for (int i = 0; i < 8; i++) {
      CHECK(starts[i + 1] % 4096 == 0);
      CHECK(starts[i + 1] - starts[i] >= sizes[i]);
      CHECK(starts[i + 1] - starts[i] < sizes[i] + 4096);
    }
    CHECK(at.chunk >= 4096 && at.chunk % 4096 == 0 && at.ring % at.chunk == 0 && at.ring / at.chunk >= STAGE_SLOTS);
    CHECK(n * at.ring <= 16 * MiB && (n > 2 || at.ring == 2 * MiB));
    CHECK(at.p2p_chunk >= 4096 && at.p2p_chunk % 4096 == 0 && (at.p2p_chunk == 4096 || pairs * P2P_SLOTS * at.p2p_chunk <= 64 * MiB));
    CHECK(at.ahead_bytes >= 1024 && at.ahead_bytes % LINE == 0 && n * AHEAD * at.ahead_bytes <= 8 * MiB);
    CHECK(n > 64 || at.ahead_bytes == 4096);
    CHECK(n > 16 || (at.chunk == 256 * KiB && at.p2p_chunk == 64 * KiB));
  }
}

/* A memfd that cannot grow: should the check fail to refuse, fallocate does, and takes no memory. */
static int sealed_memfd(void) {
  int fd = memfd_create("sealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  CHECK(fd >= 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_GROW) == 0);
  return fd;
}

SCENE(more_than_the_machines_memory_is_refused_before_taking_any) {
  int fd = sealed_memfd();
  FAILS(reserve(fd, NULL, 0, (size_t)1 << 45, "a test"), ncclSystemError, "a test needs 33554432.0 MiB of shared memory, ");
  CHECK(strstr(thread_error(), " MiB available; use fewer ranks"));
  close(fd);
}

SCENE(memory_that_the_system_refuses_is_an_error_in_words) {
  int fd = sealed_memfd();
  FAILS(reserve(fd, NULL, 0, 8192, "a test"), ncclSystemError, "of which the system gave 0.0 MiB: Operation not permitted");
  close(fd);
}

static void write_file(const char *folder, const char *name, const char *text) {
  char path[600];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  FILE *file = fopen(path, "w");
  CHECK(file && fputs(text, file) >= 0);
  fclose(file);
}

SCENE(a_control_group_allows_its_limit_less_what_is_used_and_not_cached) {
  char mount[300], folder[400];
  snprintf(mount, sizeof mount, "%s/pynccl-test-XXXXXX", getenv("TMPDIR") ? getenv("TMPDIR") : "/tmp");
  CHECK(mkdtemp(mount));
  snprintf(folder, sizeof folder, "%s/job", mount);
  CHECK(mkdir(folder, 0700) == 0);
  struct control_group v2 = groups_v2, v1 = groups_v1;
  v2.mount = v1.mount = mount;

  CHECK(group_allows(&v2, "/job") == UINT64_MAX); /* no limit to be read */
  write_file(folder, "memory.current", "700\n");
  write_file(folder, "memory.max", "max\n");
  CHECK(group_allows(&v2, "/job") == UINT64_MAX);
  write_file(folder, "memory.max", "1000\n");
  CHECK(group_allows(&v2, "/job") == 300);
  write_file(folder, "memory.stat", "anon 500\nfile 200\ninactive_file 150\nactive_file 50\nworkingset_x 7\n");
  CHECK(group_allows(&v2, "/job") == 500);
  write_file(folder, "memory.current", "5000\n");
  CHECK(group_allows(&v2, "/job") == 0);

  write_file(folder, "memory.usage_in_bytes", "700\n");
  write_file(folder, "memory.limit_in_bytes", "9223372036854771712\n"); /* version 1's "none" */
  CHECK(group_allows(&v1, "/job") == UINT64_MAX);
  write_file(folder, "memory.limit_in_bytes", "1000\n");
  write_file(folder, "memory.stat", "inactive_file 9\ntotal_inactive_file 10\ntotal_active_file 20\n");
  CHECK(group_allows(&v1, "/job") == 330);

  const char *names[] = {"memory.current", "memory.max", "memory.stat", "memory.usage_in_bytes", "memory.limit_in_bytes"};
  for (int i = 0; i < 5; i++) {
    char path[600];
    snprintf(path, sizeof path, "%s/%s", folder, names[i]);
    CHECK(unlink(path) == 0);
  }
  CHECK(rmdir(folder) == 0 && rmdir(mount) == 0);
}

SCENE(a_file_size_limit_is_an_error_and_not_a_signal) {
  struct rlimit limit = {1 * MiB, 1 * MiB};
  CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
  int before = open_descriptors(), fd = -7;
  FAILS(segment_create(2 * MiB, 0, &fd), ncclSystemError, "raise the file size limit (ulimit -f)");
  CHECK(fd == -7 && open_descriptors() == before);
}

static struct token token_of(unsigned char byte) { return (struct token){{byte}}; }

SCENE(ranks_of_one_process_share_one_mapping) {
  int before = open_descriptors(), fd;
  struct token token = token_of(1);
  struct segment *first, *second;
  CHECK(segment_create(2 * MiB, 1 * MiB, &fd) == ncclSuccess);
  struct stat stat;
  CHECK(fstat(fd, &stat) == 0 && stat.st_size == 2 * (off_t)MiB && stat.st_blocks * 512 == 1 * (blkcnt_t)MiB);
  int copy = dup(fd);
  CHECK(segment_attach(&token, fd, 2 * MiB, &first) == ncclSuccess);
  CHECK(segment_attach(&token, copy, 2 * MiB, &second) == ncclSuccess);
  CHECK(first == second && first->fd == fd && first->bytes == 2 * MiB);
  for (size_t i = 0; i < 2 * MiB; i += 4096) CHECK(first->base[i] == 0);
  first->base[5] = 1;
  segment_detach(first);
  CHECK(second->base[5] == 1);
  segment_detach(second);
  CHECK(open_descriptors() == before);
}

SCENE(a_token_in_use_again_names_the_new_segment) {
  int one, two;
  struct token token = token_of(2);
  struct segment *first, *second;
  CHECK(segment_create(4096, 4096, &one) == ncclSuccess && segment_create(4096, 4096, &two) == ncclSuccess);
  CHECK(segment_attach(&token, one, 4096, &first) == ncclSuccess && segment_attach(&token, two, 4096, &second) == ncclSuccess);
  CHECK(first != second && first->base != second->base);
  segment_detach(first);
  segment_detach(second);
}

SCENE(a_segment_that_is_too_small_is_an_error) {
  int before = open_descriptors(), fd;
  struct token token = token_of(3);
  struct segment *segment;
  CHECK(segment_create(4096, 0, &fd) == ncclSuccess);
  FAILS(segment_attach(&token, fd, 8192, &segment), ncclInternalError, "a segment of 8192 bytes is needed, the one received has 4096");
  CHECK(segment == NULL && open_descriptors() == before);
}

static struct segment *of_parent;
static void attach_in_child(void) {
  struct segment *own;
  CHECK(segment_attach(&of_parent->token, dup(of_parent->fd), of_parent->bytes, &own) == ncclSuccess);
  CHECK(own != of_parent && own->base != of_parent->base);
  own->base[0] = 9;
  segment_detach(of_parent); /* not the child's: left alone */
  CHECK(own->base[0] == 9 && of_parent->base[0] == 9);
  segment_detach(own);
}

SCENE(a_forked_child_maps_for_itself) {
  int fd;
  struct token token = token_of(4);
  CHECK(segment_create(4096, 4096, &fd) == ncclSuccess && segment_attach(&token, fd, 4096, &of_parent) == ncclSuccess);
  in_child(attach_in_child);
  CHECK(of_parent->base[0] == 9);
  segment_detach(of_parent);
}
