/* Run-time parameters by key (ncclParam*): what steers the host library, read where it is used, so always the value in force. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "copy.h"
#include "host.h"

static int64_t timeout_seconds(void) { return (int64_t)default_timeout(); }
static int64_t max_ranks(void) { return MAX_RANKS; }
static int64_t one_shot_bytes(void) { return ONE_SHOT_BYTES; }
static int64_t stage_slots(void) { return STAGE_SLOTS; }
static int64_t message_slots(void) { return P2P_SLOTS; }
static int64_t streaming_bytes(void) { return (int64_t)streaming_threshold(); }
static int64_t direct_bytes(void) { return (int64_t)direct_threshold(); }

struct ncclParamHandle {
  const char *key;
  int64_t (*value)(void);
};

static struct ncclParamHandle parameters[] = {
    {"PYNCCL_TIMEOUT", timeout_seconds},
    {"PYNCCL_MAX_RANKS", max_ranks},
    {"PYNCCL_ONE_SHOT_BYTES", one_shot_bytes},
    {"PYNCCL_STAGE_SLOTS", stage_slots},
    {"PYNCCL_MESSAGE_SLOTS", message_slots},
    {"PYNCCL_STREAMING_BYTES", streaming_bytes},
    {"PYNCCL_DIRECT_BYTES", direct_bytes},
};
enum { PARAMETERS = sizeof parameters / sizeof *parameters };

ncclResult_t ncclParamBind(ncclParamHandle_t *out, const char *key) {
  if (out == NULL || key == NULL) return fail(NULL, ncclInvalidArgument, "ncclParamBind: out is %p, key is %s", (void *)out, key == NULL ? "NULL" : key);
  for (int i = 0; i < PARAMETERS; i++)
    if (strcmp(parameters[i].key, key) == 0) {
      *out = &parameters[i];
      return ncclSuccess;
    }
  return fail(NULL, ncclInvalidArgument, "the host library has no parameter \"%s\"; ncclParamGetAllParameterKeys lists them", key);
}

static ncclResult_t get(ncclParamHandle_t handle, int64_t low, int64_t high, int64_t *out, const void *target) {
  int known = 0; /* compared, never followed first */
  while (known < PARAMETERS && handle != &parameters[known]) known++;
  if (known == PARAMETERS || target == NULL)
    return fail(NULL, ncclInvalidArgument, "ncclParamGet: the handle does not come from ncclParamBind, or out is NULL");
  *out = handle->value();
  if (*out >= low && *out <= high) return ncclSuccess;
  return fail(NULL, ncclInvalidArgument, "ncclParamGet: %s is %lld, which this type cannot hold", handle->key, (long long)*out);
}

/* One typed reader. */
#define READER(SUFFIX, TYPE, LOW, HIGH)                                  \
  ncclResult_t ncclParamGet##SUFFIX(ncclParamHandle_t handle, TYPE *out) { \
    int64_t value = 0;                                                      \
    const ncclResult_t code = get(handle, LOW, HIGH, &value, out);       \
    if (code == ncclSuccess) *out = (TYPE)value;                         \
    return code;                                                         \
  }
READER(I8, int8_t, INT8_MIN, INT8_MAX)
READER(I16, int16_t, INT16_MIN, INT16_MAX)
READER(I32, int32_t, INT32_MIN, INT32_MAX)
READER(I64, int64_t, INT64_MIN, INT64_MAX)
READER(U8, uint8_t, 0, UINT8_MAX)
READER(U16, uint16_t, 0, UINT16_MAX)
READER(U32, uint32_t, 0, UINT32_MAX)
READER(U64, uint64_t, 0, INT64_MAX)

ncclResult_t ncclParamGetStr(ncclParamHandle_t handle, const char **out) {
  static _Thread_local char text[32];
  int64_t value = 0;
  const ncclResult_t code = get(handle, INT64_MIN, INT64_MAX, &value, out);
  if (code != ncclSuccess) return code;
  snprintf(text, sizeof text, "%lld", (long long)value);
  *out = text;
  return ncclSuccess;
}

ncclResult_t ncclParamGet(ncclParamHandle_t handle, void *out, int room, int *length) {
  int64_t value = 0;
  const ncclResult_t code = get(handle, INT64_MIN, INT64_MAX, &value, out);
  if (code != ncclSuccess) return code;
  if (room < (int)sizeof value || length == NULL)
    return fail(NULL, ncclInvalidArgument, "ncclParamGet: a buffer of %d bytes, length at %p; 8 bytes are needed", room, (void *)length);
  memcpy(out, &value, sizeof value);
  *length = sizeof value;
  return ncclSuccess;
}

ncclResult_t ncclParamGetParameter(const char *key, const char **value, int *length) {
  static _Thread_local char text[32];
  ncclParamHandle_t handle;
  if (value == NULL || length == NULL) return fail(NULL, ncclInvalidArgument, "ncclParamGetParameter: value or valueLen is NULL");
  const ncclResult_t code = ncclParamBind(&handle, key);
  if (code != ncclSuccess) return code;
  *length = snprintf(text, sizeof text, "%lld", (long long)handle->value());
  *value = text;
  return ncclSuccess;
}

ncclResult_t ncclParamGetAllParameterKeys(const char ***table, int *length) {
  static _Thread_local const char *keys[PARAMETERS];
  if (table == NULL || length == NULL) return fail(NULL, ncclInvalidArgument, "ncclParamGetAllParameterKeys: table or tableLen is NULL");
  for (int i = 0; i < PARAMETERS; i++) keys[i] = parameters[i].key;
  *table = keys;
  *length = PARAMETERS;
  return ncclSuccess;
}

void ncclParamDumpAll(void) {
  for (int i = 0; i < PARAMETERS; i++) fprintf(stderr, "%s=%lld\n", parameters[i].key, (long long)parameters[i].value());
}

PNCCL(ncclParamBind);
PNCCL(ncclParamGetI8);
PNCCL(ncclParamGetI16);
PNCCL(ncclParamGetI32);
PNCCL(ncclParamGetI64);
PNCCL(ncclParamGetU8);
PNCCL(ncclParamGetU16);
PNCCL(ncclParamGetU32);
PNCCL(ncclParamGetU64);
PNCCL(ncclParamGetStr);
PNCCL(ncclParamGet);
PNCCL(ncclParamGetParameter);
PNCCL(ncclParamGetAllParameterKeys);
PNCCL(ncclParamDumpAll);
