/* Calls as functions of Python's own: Python calls them in 0.03 us, where ctypes takes 0.15 us and 0.1 more for each argument.
 *
 * Whoever loads this library from Python passes the few functions of Python's stable ABI that this takes, so nothing here needs Python, and
 * a program without one loses nothing. A function's `self` is the address of its record, as an int. */
#include "python.h"

#include <stddef.h>

#include "arrays.h"

static pyncclPython_t python; /* of the process: the same whoever passes it */

static void *as_int(int code) { return python.PyLong_FromLong(code); }

/* Letting the interpreter's lock go and taking it back costs as much as the rest of the way through Python. So a small call keeps it until
 * it has to wait for more than a moment: others may use Python from then on. */
#define SMALL_COUNT 2048

static _Thread_local void **let_go_of; /* where the present call keeps its thread's state; NULL in there: it has the lock */
_Thread_local void (*before_waiting)(void);

static void let_go(void) {
  before_waiting = NULL;
  *let_go_of = python.PyEval_SaveThread();
}

static void *make(const pyncclCall_t *record) {
  void **const outer = let_go_of; /* of a call that was interrupted to make this one */
  void (*const outer_waits)(void) = before_waiting;
  void *thread = NULL;
  let_go_of = &thread;
  if (record->count <= SMALL_COUNT)
    before_waiting = let_go;
  else
    let_go();
  const ncclResult_t code = pyncclCall(record);
  if (thread != NULL) python.PyEval_RestoreThread(thread);
  let_go_of = outer;
  before_waiting = outer_waits;
  return as_int((int)code);
}

static void *call_arrays(void *self, void *const *arguments, ptrdiff_t n) {
  pyncclCall_t made;
  /* Nobody can change the arrays while they are looked at, and the caller holds them until this returns. */
  if (n < 2 || n > 3 || !plain_call(python.PyLong_AsVoidPtr(self), arguments[0], arguments[1], &made)) return as_int(PYNCCL_NOT_TAKEN);
  return n == 3 ? as_int((int)ncclSuccess) : make(&made);
}

static void *call(void *self, void *nothing) {
  (void)nothing;
  return make(python.PyLong_AsVoidPtr(self));
}

struct method { /* PyMethodDef */
  const char *name;
  void *function;
  int flags;
  const char *words;
};

enum { METH_NOARGS = 0x4, METH_FASTCALL = 0x80 };

static void *function_of(const pyncclPython_t *given, struct method *method, void *address) {
  if (given == NULL || given->size != sizeof *given) return NULL;
  if (python.size == 0) python = *given;
  return python.PyCFunction_NewEx(method, address, NULL);
}

void *pyncclFunctionOfArrays(const pyncclPython_t *given, void *address) {
  static struct method method = {"collective", (void *)call_arrays, METH_FASTCALL, "(x, out): the call of the pyncclArrayCall_t at __self__; with a third argument only a look at x and out"};
  return function_of(given, &method, address);
}

void *pyncclFunctionOfCall(const pyncclPython_t *given, void *address) {
  static struct method method = {"prepared", (void *)call, METH_NOARGS, "(): the call of the pyncclCall_t at __self__"};
  return function_of(given, &method, address);
}
