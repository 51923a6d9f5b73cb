/* From array objects to the arguments of a collective: what Python would take a microsecond for.
 *
 * Nothing is assumed of an array but what its pyncclLayout_t says, which whoever makes one has to check on real arrays. */
#include "arrays.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Of each call: blocks of x and of out (0: as many as ranks), who has them, and how they may lie in each other. */
static const struct form {
  int x_blocks, out_blocks;
  bool x_at_root, out_at_root; /* there alone */
  bool needs_out;              /* without one the result does not replace x */
  bool apart;                  /* x and out may not be the same memory */
} FORMS[] = {
    [pyncclAllReduce] = {1, 1, false, false, false, false},
    [pyncclReduce] = {1, 1, false, true, false, false},
    [pyncclReduceScatter] = {0, 1, false, false, true, false},
    [pyncclBroadcast] = {1, 1, true, false, false, false},
    [pyncclAllGather] = {1, 0, false, false, true, false},
    [pyncclGather] = {1, 0, false, true, true, false},
    [pyncclScatter] = {0, 1, true, false, true, false},
    [pyncclAlltoAll] = {0, 0, false, false, true, true},
    [pyncclSend] = {1, 1, false, false, false, false},
    [pyncclRecv] = {1, 1, false, false, false, false},
};

struct array {
  char *data;
  size_t count;
  const pyncclElement_t *element;
};

static const void *pointer_at(const void *object, int at) {
  const void *pointer;
  memcpy(&pointer, (const char *)object + at, sizeof pointer);
  return pointer;
}

static int int_at(const void *object, int at) {
  int number;
  memcpy(&number, (const char *)object + at, sizeof number);
  return number;
}

static bool look_at(const pyncclArrayCall_t *call, const void *object, struct array *array) {
  const pyncclLayout_t *layout = call->layout;
  if (pointer_at(object, layout->type_at) != layout->type) return false;
  if ((int_at(object, layout->flags_at) & layout->flags) != layout->flags) return false;
  const void *tag = pointer_at(object, layout->element_at);
  array->element = NULL;
  for (int i = 0; i < call->nelements && array->element == NULL; i++)
    if (call->elements[i].tag == tag) array->element = &call->elements[i];
  const ptrdiff_t *shape = pointer_at(object, layout->shape_at);
  array->data = (char *)pointer_at(object, layout->data_at);
  array->count = 1;
  for (int axis = int_at(object, layout->axes_at) - 1; axis >= 0; axis--) array->count *= (size_t)shape[axis];
  return array->element != NULL;
}

/* Do they lie apart, or the one in the other as the collective allows? */
static bool placed_well(const struct form *form, const struct array *x, const struct array *out, size_t block, int rank) {
  const uintptr_t from = (uintptr_t)x->data, to = (uintptr_t)out->data;
  const size_t bytes = x->element->bytes;
  if (from + x->count * bytes <= to || to + out->count * bytes <= from) return true;
  if (form->apart) return false;
  if (form->x_blocks == form->out_blocks) return from == to;
  const size_t mine = (size_t)rank * block * bytes; /* the smaller is this rank's block of the larger */
  return form->out_blocks == 1 ? to - from == mine : from - to == mine;
}

bool plain_call(const pyncclArrayCall_t *call, const void *x, const void *out, pyncclCall_t *made) {
  const size_t kinds = sizeof FORMS / sizeof FORMS[0];
  if (call == NULL || call->size != sizeof *call || call->kind < 0 || (size_t)call->kind >= kinds) return false;
  const struct form *form = &FORMS[call->kind];
  const bool has_x = !form->x_at_root || call->rank == call->root, has_out = !form->out_at_root || call->rank == call->root;
  const bool no_out = out == call->layout->none;
  struct array from, to;
  if (has_x && !has_out) { /* off the root of a reduce or gather: what is given for out is not used */
    if (!look_at(call, x, &from)) return false;
    to = (struct array){.data = NULL};
  } else if (!has_x && form->needs_out) { /* off the root of a scatter: x may say a shape, which is not for here */
    if (x != call->layout->none || !look_at(call, out, &to)) return false;
    from = to;
  } else {
    if ((no_out && form->needs_out) || !look_at(call, x, &from)) return false;
    to = from;
    if (!no_out && !look_at(call, out, &to)) return false;
    const size_t gives = form->x_blocks ? 1 : (size_t)call->nranks, gets = form->out_blocks ? 1 : (size_t)call->nranks;
    const size_t block = from.count / gives;
    if (to.element != from.element || block * gives != from.count || block * gets != to.count) return false;
    if (!no_out && !placed_well(form, &from, &to, block, call->rank)) return false;
    from.count = block;
    if (!has_x) from.data = to.data;
  }
  *made = (pyncclCall_t){
      .size = sizeof *made,
      .kind = call->kind,
      .dtype = from.element->dtype,
      .op = from.element->op,
      .root = call->root,
      .send = from.data,
      .recv = to.data,
      .count = from.count * (size_t)from.element->lanes,
      .comm = call->comm,
  };
  return true;
}
