/* heap.c: blocks, offsets, peers, forks. It is included whole, to reach its private parts. */
#include "../../pynccl/host/src/heap.c"

#include "parts.h"

static char *alloc(size_t bytes) {
  void *pointer;
  CHECK(heap_alloc(&pointer, bytes) == ncclSuccess);
  return pointer;
}

SCENE(without_an_allocation_there_is_no_heap) {
  char local;
  CHECK(heap_offset(&local, 1) == NOT_MAPPED && heap_offset(NULL, 0) == NOT_MAPPED);
  CHECK(heap_descriptor() == -1 && heap_base() == NULL && arena == NULL);
  CHECK(heap_free(NULL) == ncclSuccess && alloc(0) == NULL && arena == NULL);
}

SCENE(blocks_are_zeroed_pages_and_offsets_lie_in_the_heap) {
  char local, *a = alloc(5000), *b = alloc(1);
  CHECK(a == heap_base() && b == a + 8192 && heap_descriptor() >= 0);
  CHECK(heap_offset(a, 8192) == 0 && heap_offset(b + 3, 1) == 8195 && heap_offset(&local, 1) == NOT_MAPPED);
  CHECK(heap_offset(heap_base() - 1, 1) == NOT_MAPPED && heap_offset(heap_base() + SPAN - 1, 1) == SPAN - 1);
  CHECK(heap_offset(heap_base() + SPAN - 1, 2) == NOT_MAPPED && heap_offset(heap_base() + SPAN, 0) == NOT_MAPPED);
  CHECK(heap_offset(a, SIZE_MAX) == NOT_MAPPED);
  for (int i = 0; i < 8192; i++) CHECK(a[i] == 0);
  CHECK(heap_free(a) == ncclSuccess && heap_free(b) == ncclSuccess);
}

static blkcnt_t memory_behind(void) {
  struct stat stat;
  CHECK(fstat(heap_descriptor(), &stat) == 0);
  return stat.st_blocks * 512;
}

SCENE(memory_is_there_at_allocation_and_given_back_by_free) {
  char *a = alloc(1 << 20);
  CHECK(memory_behind() == 1 << 20);
  memset(a, 7, 1 << 20);
  CHECK(heap_free(a) == ncclSuccess && memory_behind() == 0);
  char *again = alloc(1 << 20);
  CHECK(again == a && again[0] == 0 && again[(1 << 20) - 1] == 0);
  CHECK(heap_free(again) == ncclSuccess);
}

SCENE(the_first_hole_that_is_large_enough_is_taken) {
  char *blocks[6];
  for (int i = 0; i < 6; i++) blocks[i] = alloc(4096);
  CHECK(heap_free(blocks[1]) == ncclSuccess && heap_free(blocks[4]) == ncclSuccess && heap_free(blocks[3]) == ncclSuccess);
  CHECK(alloc(8192) == blocks[3]); /* two freed neighbours are one hole */
  CHECK(alloc(4096) == blocks[1]);
  CHECK(alloc(4096) == blocks[5] + 4096);
}

SCENE(freeing_what_is_not_a_live_block_is_an_error) {
  char local, *a = alloc(8192);
  FAILS(heap_free(&local), ncclInvalidArgument, "is not from ncclMemAlloc");
  FAILS(heap_free(a + 4096), ncclInvalidArgument, "is not the start of a live block");
  CHECK(heap_free(a) == ncclSuccess);
  FAILS(heap_free(a), ncclInvalidArgument, "was it freed before?");
}

SCENE(large_blocks_begin_with_a_huge_page_and_small_ones_fill_the_gaps) {
  char *small = alloc(4096), *large = alloc(2 * HUGE_PAGE + 4096), *other = alloc(HUGE_PAGE), *gap = alloc(4096);
  CHECK((uintptr_t)heap_base() % HUGE_PAGE == 0 && small == heap_base());
  CHECK(heap_offset(large, 1) == HUGE_PAGE && heap_offset(other, 1) == 4 * HUGE_PAGE && gap == small + 4096);
  memset(large, 7, 2 * HUGE_PAGE + 4096);
  CHECK(heap_free(large) == ncclSuccess && memory_behind() == HUGE_PAGE + 2 * 4096);
  large = alloc(2 * HUGE_PAGE);
  CHECK(heap_offset(large, 1) == HUGE_PAGE);
  for (size_t i = 0; i < 2 * HUGE_PAGE; i += 1000) CHECK(large[i] == 0);
}

SCENE(a_heap_without_room_is_an_error_with_the_sizes) {
  void *pointer = &pointer;
  size_t offset;
  FAILS(heap_alloc(&pointer, SPAN + 1), ncclInvalidArgument, "a process has room for 65536.0 MiB");
  CHECK(pointer == NULL);
  CHECK(make_arena() == ncclSuccess); /* address space alone: takes no memory */
  CHECK(insert_block((size_t)40 << 30, &offset) == ncclSuccess && offset == 0);
  FAILS(insert_block((size_t)40 << 30, &offset), ncclSystemError, "no room for 40960.0 MiB: 1 blocks are live");
  CHECK(insert_block((size_t)24 << 30, &offset) == ncclSuccess && offset == (size_t)40 << 30);
  FAILS(insert_block(4096, &offset), ncclSystemError, "no room");
}

SCENE(a_limit_of_address_space_is_an_error_in_words) {
  size_t pages;
  FILE *statm = fopen("/proc/self/statm", "r");
  CHECK(statm && fscanf(statm, "%zu", &pages) == 1);
  fclose(statm);
  struct rlimit limit = {pages * 4096 + ((rlim_t)2 << 30), RLIM_INFINITY};
  CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
  void *pointer;
  int before = open_descriptors();
  FAILS(heap_alloc(&pointer, 1), ncclSystemError, "raise the limit of address space (ulimit -v)");
  CHECK(pointer == NULL && open_descriptors() == before);
}

static struct {
  pid_t pid;
  int fd, small;
  char *block;
  size_t offset;
} parent;

static void use_parents_heap(void) {
  CHECK(heap_offset(parent.block, 1) == NOT_MAPPED && heap_descriptor() == -1 && heap_base() == NULL);
  CHECK(*parent.block == 42); /* still readable */
  FAILS(heap_free(parent.block), ncclInvalidArgument, "by the process that this one was forked from");

  char *own = alloc(1);
  CHECK(heap_offset(own, 1) == 0 && *own == 0);

  int before = open_descriptors();
  char *peer = heap_map_peer(parent.pid, parent.fd, heap_span());
  CHECK(peer && peer != heap_base() && peer[parent.offset] == 42 && open_descriptors() == before);
  peer[parent.offset] = 43;
  heap_unmap_peer(peer, heap_span());
  CHECK(heap_map_peer(parent.pid, parent.small, heap_span()) == NULL); /* not a heap */
  CHECK(heap_map_peer(parent.pid, 9999, heap_span()) == NULL && heap_map_peer(0x3fffffff, 3, heap_span()) == NULL);
}

SCENE(another_process_maps_the_heap_and_a_forked_child_makes_its_own) {
  alloc(4096);
  parent.pid = getpid();
  parent.block = alloc(1);
  parent.fd = heap_descriptor();
  CHECK(segment_create(4096, 0, &parent.small) == ncclSuccess);
  parent.offset = heap_offset(parent.block, 1);
  *parent.block = 42;
  in_child(use_parents_heap);
  CHECK(*parent.block == 43 && heap_free(parent.block) == ncclSuccess);
}

SCENE(our_own_heap_is_not_mapped_twice) {
  char *block = alloc(1);
  CHECK(heap_map_peer(getpid(), heap_descriptor(), heap_span()) == heap_base());
  heap_unmap_peer(heap_base(), heap_span());
  *block = 1; /* still mapped */
}

static void *churn(void *seed) {
  unsigned state = (unsigned)(uintptr_t)seed;
  char *held[8] = {0};
  for (int i = 0; i < 400; i++) {
    state = state * 1664525u + 1013904223u;
    int slot = state >> 16 & 7;
    if (held[slot]) {
      CHECK(*held[slot] == (char)(uintptr_t)seed && heap_free(held[slot]) == ncclSuccess);
      held[slot] = NULL;
    } else {
      held[slot] = alloc(state >> 20 & 0xfff0);
      if (held[slot]) {
        CHECK(*held[slot] == 0 && heap_offset(held[slot], 1) != NOT_MAPPED);
        *held[slot] = (char)(uintptr_t)seed;
      }
    }
  }
  for (int i = 0; i < 8; i++) CHECK(heap_free(held[i]) == ncclSuccess);
  return NULL;
}

SCENE(threads_allocate_and_free_at_once) {
  pthread_t threads[4];
  for (uintptr_t i = 0; i < 4; i++) CHECK(pthread_create(&threads[i], NULL, churn, (void *)(i + 1)) == 0);
  for (int i = 0; i < 4; i++) CHECK(pthread_join(threads[i], NULL) == 0);
  CHECK(arena->nblocks == 0 && memory_behind() == 0);
}
