/* The machine's limit for a collective: its bytes, moved by as many processes, with nobody to wait for.
 *
 *     roofline SOCKET RANKS
 *
 * RANKS processes connect to the Unix socket SOCKET and obey the lines that bench/peer/worker.py documents. A
 * call of a process loads `loads` streams of `elements` floats, adds them, and stores the sum to `stores`
 * streams: see `streams` in bench/peer/cases.py for what an operation needs. Key "streaming" stores past the
 * caches, "cached" through them; the reader of the times takes the faster. A call of key "meeting" moves nothing:
 * all processes wait for each other once, which no collective can do without. A call of key "passing" hands the
 * case's bytes to the next process through shared memory, a chunk after another: what crosses between cores
 * costs several times more in some minutes than in others, and ordinary arrays have to cross.
 */
#include <inttypes.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#define MOST_STREAMS 64
#define MOST_KEYS 4
#define WARM_UP 8 /* as in worker.py */
#define CHUNK ((size_t)128 << 10) /* bytes; a slot holds one, and each process has two */
#define HUGE_PAGE ((size_t)2 << 20)

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

typedef float vector __attribute__((vector_size(VECTOR_BYTES)));

enum { LANES = VECTOR_BYTES / sizeof(float), UNROLL = 4 };

struct meeting {
    _Alignas(128) _Atomic uint32_t arrived;
    _Alignas(128) _Atomic uint32_t round;
};

struct job {
    char key[32];
    int loads, stores;
    size_t elements; /* of one stream */
    size_t stride;   /* from one stream to the next */
    float *memory;   /* the loaded streams, then the stored ones */
    size_t bytes;
    size_t passed; /* bytes, by a call of "passing" */
};

static struct meeting *meeting;
static char *slots; /* of all processes, shared */
static uint32_t ranks, me;
static int patience; /* looks at a flag before the core is offered to others: none where others need it */

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static void barrier(void) {
    uint32_t round = atomic_load(&meeting->round);
    if (atomic_fetch_add(&meeting->arrived, 1) + 1 == ranks) {
        atomic_store(&meeting->arrived, 0);
        atomic_fetch_add(&meeting->round, 1);
        return;
    }
    for (int looks = 0; atomic_load_explicit(&meeting->round, memory_order_acquire) == round; looks++)
        if (looks >= patience)
            sched_yield();
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline void store(float *to, vector value, bool streaming) {
#if defined(__AVX512F__)
    if (streaming) {
        _mm512_stream_ps(to, (__m512)value);
        return;
    }
#elif defined(__AVX__)
    if (streaming) {
        _mm256_stream_ps(to, (__m256)value);
        return;
    }
#elif defined(__x86_64__)
    if (streaming) {
        _mm_stream_ps(to, (__m128)value);
        return;
    }
#else
    (void)streaming;
#endif
    *(vector *)to = value;
}

/* Inlined where loads, stores and streaming are constants, so that no loop over streams is left. */
static inline __attribute__((always_inline)) void move(const struct job *job, int loads, int stores, bool streaming) {
    const float *from[MOST_STREAMS];
    float *to[MOST_STREAMS];
    for (int i = 0; i < loads; i++)
        from[i] = job->memory + (size_t)i * job->stride;
    for (int i = 0; i < stores; i++)
        to[i] = job->memory + (size_t)(loads + i) * job->stride;
    size_t at = 0;
    for (; at + UNROLL * LANES <= job->elements; at += UNROLL * LANES) {
        vector sum[UNROLL];
        for (int u = 0; u < UNROLL; u++)
            sum[u] = *(const vector *)(from[0] + at + u * LANES);
        for (int i = 1; i < loads; i++)
            for (int u = 0; u < UNROLL; u++)
                sum[u] += *(const vector *)(from[i] + at + u * LANES);
        for (int i = 0; i < stores; i++)
            for (int u = 0; u < UNROLL; u++)
                store(to[i] + at + u * LANES, sum[u], streaming);
    }
    for (; at < job->elements; at++) {
        float sum = from[0][at];
        for (int i = 1; i < loads; i++)
            sum += from[i][at];
        for (int i = 0; i < stores; i++)
            to[i][at] = sum;
    }
#ifdef __x86_64__
    if (streaming)
        _mm_sfence();
#endif
}

static inline __attribute__((always_inline)) void call(const struct job *job, bool streaming) {
    int loads = job->loads, stores = job->stores;
    if (loads == 1 && stores == 1)
        move(job, 1, 1, streaming);
    else if (loads == 1 && stores == 2)
        move(job, 1, 2, streaming);
    else if (loads == 2 && stores == 1)
        move(job, 2, 1, streaming);
    else if (loads == 2 && stores == 2)
        move(job, 2, 2, streaming);
    else if (loads == 1 && stores == 3)
        move(job, 1, 3, streaming);
    else if (loads == 1 && stores == 4)
        move(job, 1, 4, streaming);
    else if (loads == 4 && stores == 1)
        move(job, 4, 1, streaming);
    else if (loads == 4 && stores == 4)
        move(job, 4, 4, streaming);
    else
        move(job, loads, stores, streaming);
}

static double mean_meeting(uint64_t count) {
    for (uint64_t i = 0; i <= count / WARM_UP; i++)
        barrier();
    double start = now();
    for (uint64_t i = 0; i < count; i++)
        barrier();
    return (now() - start) / (double)count;
}

static char *slot(uint32_t rank, unsigned turn) {
    return slots + (2 * (size_t)rank + turn % 2) * CHUNK;
}

/* One meeting a chunk is enough: a slot is written again only after the next meeting, when it has been read. */
static void pass(const struct job *job, unsigned *turn) {
    char *from = (char *)job->memory, *to = from + job->passed;
    for (size_t at = 0; at < job->passed; at += CHUNK, ++*turn) {
        size_t size = job->passed - at < CHUNK ? job->passed - at : CHUNK;
        memcpy(slot(me, *turn), from + at, size);
        barrier();
        memcpy(to + at, slot((me + 1) % ranks, *turn), size);
    }
}

static double mean_passing(const struct job *job, uint64_t count) {
    unsigned turn = 0;
    for (uint64_t i = 0; i <= count / WARM_UP; i++)
        pass(job, &turn);
    barrier();
    double start = now();
    for (uint64_t i = 0; i < count; i++)
        pass(job, &turn);
    double taken = now() - start;
    barrier(); /* the next job's first slot may be one that is still read */
    return taken / (double)count;
}

static double mean_seconds(const struct job *job, uint64_t count) {
    if (strcmp(job->key, "meeting") == 0)
        return mean_meeting(count);
    if (strcmp(job->key, "passing") == 0)
        return mean_passing(job, count);
    bool streaming = strcmp(job->key, "streaming") == 0;
    for (uint64_t i = 0; i <= count / WARM_UP; i++)
        call(job, streaming);
    barrier();
    double start = now();
    if (streaming)
        for (uint64_t i = 0; i < count; i++) {
            call(job, true);
            atomic_signal_fence(memory_order_seq_cst); /* the next call may not be merged with this one */
        }
    else
        for (uint64_t i = 0; i < count; i++) {
            call(job, false);
            atomic_signal_fence(memory_order_seq_cst);
        }
    return (now() - start) / (double)count;
}

static void forget(struct job *job) {
    if (job->memory)
        munmap(job->memory, job->bytes);
    memset(job, 0, sizeof *job);
}

static struct job *find(struct job *jobs, const char *key) {
    for (int i = 0; i < MOST_KEYS; i++)
        if (strcmp(jobs[i].key, key) == 0)
            return &jobs[i];
    return NULL;
}

static void set_up(struct job *job, const char *key, size_t bytes, int loads, int stores, size_t elements) {
    if (loads < 1 || stores < 1 || loads > MOST_STREAMS || stores > MOST_STREAMS || strlen(key) >= sizeof job->key) {
        fprintf(stderr, "roofline: no job %s of %d loads and %d stores\n", key, loads, stores);
        exit(2);
    }
    strcpy(job->key, key);
    job->loads = loads;
    job->stores = stores;
    job->elements = elements;
    job->stride = (elements + LANES - 1) / LANES * LANES;
    job->passed = bytes;
    size_t used = job->stride * sizeof(float) * (size_t)(loads + stores);
    if (used < 2 * bytes)
        used = 2 * bytes;
    job->bytes = (used + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    job->memory = mmap(NULL, job->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (job->memory == MAP_FAILED)
        fail("roofline: mmap");
    madvise(job->memory, job->bytes, MADV_HUGEPAGE); /* refused by some kernels, which are then slower */
    memset(job->memory, 1, used); /* tiny numbers: zeros are faster than data on some machines */
}

static void serve(uint32_t rank, const char *path) {
    me = rank;
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof name.sun_path) {
        fprintf(stderr, "roofline: the socket's path is too long: %s\n", path);
        exit(2);
    }
    strcpy(name.sun_path, path);
    int wire = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (wire < 0 || connect(wire, (struct sockaddr *)&name, sizeof name) != 0)
        fail("roofline: connect");
    FILE *in = fdopen(wire, "r"), *out = fdopen(dup(wire), "w");
    if (!in || !out)
        fail("roofline: fdopen");
    setvbuf(out, NULL, _IOLBF, 0);
    fprintf(out, "{\"rank\": %d, \"pid\": %d, \"version\": \"%d-byte vectors\"}\n", (int)rank, (int)getpid(), VECTOR_BYTES);

    struct job jobs[MOST_KEYS] = {0};
    char line[256], key[32], op[32];
    while (fgets(line, sizeof line, in)) {
        int loads, stores;
        size_t bytes, elements;
        uint64_t count;
        struct job *job;
        if (sscanf(line, "setup %31s %31s %zu %d %d %zu", key, op, &bytes, &loads, &stores, &elements) == 6 &&
            (job = find(jobs, "")) != NULL) {
            set_up(job, key, bytes, loads, stores, elements);
            fprintf(out, "{\"wrong\": 0}\n");
        } else if (sscanf(line, "time %31s %" SCNu64, key, &count) == 2 && (job = find(jobs, key)) != NULL) {
            fprintf(out, "{\"seconds\": %.9g}\n", mean_seconds(job, count));
        } else if (strcmp(line, "forget\n") == 0) {
            for (int i = 0; i < MOST_KEYS; i++)
                forget(&jobs[i]);
            fprintf(out, "{}\n");
        } else {
            fprintf(stderr, "roofline: cannot obey %s", line);
            exit(2);
        }
    }
}

int main(int argc, char **argv) {
    if (argc != 3 || (ranks = (uint32_t)strtoul(argv[2], NULL, 10)) < 1) {
        fprintf(stderr, "usage: roofline SOCKET RANKS\n");
        return 2;
    }
    cpu_set_t cores;
    if (sched_getaffinity(0, sizeof cores, &cores) != 0)
        fail("roofline: sched_getaffinity");
    patience = ranks <= (uint32_t)CPU_COUNT(&cores) ? 1000 : 0;
    meeting = mmap(NULL, sizeof *meeting, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    slots = mmap(NULL, 2 * ranks * CHUNK, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (meeting == MAP_FAILED || slots == MAP_FAILED)
        fail("roofline: mmap");
    pid_t parent = getpid();
    for (uint32_t rank = 1; rank < ranks; rank++) {
        pid_t child = fork();
        if (child < 0)
            fail("roofline: fork");
        if (child == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            if (getppid() == parent)
                serve(rank, argv[1]);
            return 0;
        }
    }
    serve(0, argv[1]);
    while (wait(NULL) > 0) {
    } /* all have lost the same parent */
    return 0;
}
