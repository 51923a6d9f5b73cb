/* Array objects of a language, as this library sees them: a type, a number of elements, an address. */
#ifndef PYNCCL_ARRAYS_H
#define PYNCCL_ARRAYS_H

#include <stdbool.h>

#include "nccl_abi.h"

/* What a call on arrays comes to. False: it is not of the plainest kind (or of none, or another version's), and *made is not to be used. */
bool plain_call(const pyncclArrayCall_t *call, const void *x, const void *out, pyncclCall_t *made);

#endif
