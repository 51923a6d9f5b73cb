/* Send and receive. Each ordered pair of ranks has a channel: both sides publish a post (dtype, count) and compare it with the other's,
 * so a disagreement is an error on both; then the payload passes through P2P_SLOTS slots. As on a GPU, a send completes only when the
 * receiver has come: nothing is buffered behind the user's back. Where the receiver's buffer lies in a heap that the sender can map,
 * the sender writes straight into it. */
#include <stdio.h>
#include <string.h>

#include "host.h"

static bool sending(const struct op *op) { return op->kind == SEND; }

static struct flow *flow_of(const struct op *op) { return sending(op) ? &op->comm->to[op->root] : &op->comm->from[op->root]; }

static struct channel *channel_for(const struct op *op) {
  return sending(op) ? channel_of(op->comm, op->comm->rank, op->root) : channel_of(op->comm, op->root, op->comm->rank);
}

static size_t slot_offset(const struct op *op, uint64_t chunk) {
  const struct ncclComm *comm = op->comm;
  const size_t pair = sending(op) ? (size_t)comm->rank * comm->nranks + op->root : (size_t)op->root * comm->nranks + comm->rank;
  return comm->layout.p2p + (pair * P2P_SLOTS + chunk % P2P_SLOTS) * comm->layout.p2p_chunk;
}

static enum progress broken(struct op *op, ncclResult_t code) {
  comm_break(op->comm, code, "%s: %s", kinds[op->kind].name, thread_error());
  return op_finish(op, code);
}

static void announce(struct op *op) {
  struct channel *channel = channel_for(op);
  struct post *post = sending(op) ? &channel->sends[op->ticket & 1] : &channel->recvs[op->ticket & 1];
  post->signature = op->dtype;
  post->count = op->count;
  post->recv_at = NOT_MAPPED;
  if (!sending(op) && op->comm->mappable && op->bytes > op->comm->layout.p2p_chunk && heap_descriptor() >= 0) {
    atomic_store_explicit(&lines_of(op->comm, op->comm->rank)->heap_fd, heap_descriptor(), memory_order_relaxed);
    post->recv_at = heap_offset(op->recv, op->bytes);
  }
  atomic_store_explicit(&post->sequence, op->ticket, memory_order_release);
}

static const char *end_words(const struct post *post, const char *call, int peer, char *buffer, size_t size) {
  snprintf(buffer, size, "%s(count=%llu, %s, peer=%d)", call, (unsigned long long)post->count, dtype_name((int)post->signature), peer);
  return buffer;
}

/* Both posts are here: the same message? Both sides say the same words. */
static bool agree(struct op *op, const struct post *send, const struct post *recv) {
  if (send->signature == recv->signature && send->count == recv->count) return true;
  const int from = sending(op) ? op->comm->rank : op->root, to = sending(op) ? op->root : op->comm->rank;
  char here[128], there[128];
  fail(op->comm, ncclInvalidUsage, "message %llu from rank %d to rank %d differs between its ends: rank %d calls %s, rank %d calls %s",
       (unsigned long long)op->ticket, from, to, from, end_words(send, "send", to, here, sizeof here), to,
       end_words(recv, "recv", from, there, sizeof there));
  return false;
}

static void plan(struct op *op, const struct post *recv) {
  op->path = recv->recv_at == NOT_MAPPED ? PATH_STAGED : PATH_PUSH;
  op->chunk = op->path == PATH_PUSH ? op->bytes : op->comm->layout.p2p_chunk; /* bytes here */
  op->steps = op->bytes == 0 ? 0 : (op->bytes + op->chunk - 1) / op->chunk;
}

/* Put in, or take out, what the counters allow. */
static enum progress pass(struct op *op) {
  struct channel *channel = channel_for(op);
  struct flow *flow = flow_of(op);
  bool moved = false;
  for (; op->step < op->steps; op->step++, moved = true) {
    const uint64_t chunk = flow->chunks + op->step;
    const size_t offset = op->step * op->chunk, length = op->bytes - offset < op->chunk ? op->bytes - offset : op->chunk;
    const uint64_t other = atomic_load_explicit(sending(op) ? &channel->got : &channel->sent, memory_order_acquire);
    if (sending(op) ? chunk >= other + P2P_SLOTS : chunk >= other) return moved ? MOVED : WAITING;
    if (op->path == PATH_STAGED) {
      char *slot = op->comm->segment->base + slot_offset(op, chunk);
      if (sending(op))
        memcpy(slot, (const char *)op->send + offset, length);
      else
        memcpy((char *)op->recv + offset, slot, length);
    } else if (sending(op)) {
      char *heap = comm_peer_heap(op->comm, op->root);
      if (heap == NULL) return broken(op, ncclSystemError);
      const ncclResult_t code = copy_to_peer(op->comm, op->root, heap + channel->recvs[op->ticket & 1].recv_at, op->send, op->bytes);
      if (code != ncclSuccess) return broken(op, code);
    }
    atomic_store_explicit(sending(op) ? &channel->sent : &channel->got, chunk + 1, memory_order_release);
  }
  flow->chunks += op->steps;
  return op_finish(op, ncclSuccess);
}

enum progress message_progress(struct op *op) {
  struct ncclComm *comm = op->comm;
  struct channel *channel = channel_for(op);
  struct flow *flow = flow_of(op);
  bool moved = false;
  if (op->phase == QUEUED) {
    const uint64_t done = atomic_load_explicit(&flow->done, memory_order_acquire);
    op->awaited = -1;
    op->steps = done + atomic_load_explicit(sending(op) ? &channel->sent : &channel->got, memory_order_relaxed); /* moves while the queue does */
    if (done + 1 != op->ticket) return WAITING;
    op->step = op->steps = 0;
    if (sending(op) && !flow->reserved && op->bytes > 0) { /* the channel's memory becomes real with its first message */
      const ncclResult_t code = reserve(comm->segment->fd, NULL, slot_offset(op, 0), P2P_SLOTS * comm->layout.p2p_chunk, "a channel between two ranks");
      if (code != ncclSuccess) return broken(op, code);
      flow->reserved = true;
    }
    announce(op);
    op->phase = ANNOUNCED;
    moved = true;
  }
  if (op->phase == ANNOUNCED) {
    const struct post *send = &channel->sends[op->ticket & 1], *recv = &channel->recvs[op->ticket & 1];
    if (atomic_load_explicit(sending(op) ? &recv->sequence : &send->sequence, memory_order_acquire) != op->ticket) {
      op->awaited = op->root;
      return moved ? MOVED : WAITING;
    }
    if (!agree(op, send, recv)) {
      if (!is_heard(op)) comm_break(comm, ncclInvalidUsage, "%s", thread_error());
      return op_finish(op, ncclInvalidUsage);
    }
    plan(op, recv);
    op->awaited = op->root;
    op->phase = RUNNING;
  }
  return pass(op);
}
