/* What a thread does before it waits for more than a moment, once; NULL: nothing. It lets the interpreter's lock go, if it has it. */
#ifndef PYNCCL_PYTHON_H
#define PYNCCL_PYTHON_H

extern _Thread_local void (*before_waiting)(void);

#endif
