#include "net.h"

#define PANELS 16 /* vocabulary panels of one task: its weights fit the second-level cache */

typedef struct {
    net *n;
    const float *hidden;
    float *logits;
    long rows;
} head_job;

static void head_task(void *context, long task, int thread) {
    (void)thread;
    head_job *j = context;
    const net *n = j->n;
    long all = n->Vp / LANES, groups = (all + PANELS - 1) / PANELS, first = task / groups * ROW_BLOCK, panel = task % groups * PANELS;
    long rows = j->rows - first < ROW_BLOCK ? j->rows - first : ROW_BLOCK, panels = all - panel < PANELS ? all - panel : PANELS;
    gemm(rows, panels, n->c.hidden, j->hidden + first * n->Dp, n->Dp, n->head + panel * LANES * n->c.hidden, LANES, LANES * n->c.hidden,
         j->logits + first * n->Vp + panel * LANES, n->Vp, STORE);
}

void head_logits(net *n, const float *hidden, long rows, float *logits) {
    head_job job = {n, hidden, logits, rows};
    long groups = (n->Vp / LANES + PANELS - 1) / PANELS;
    pool_run(n->workers, head_task, &job, (rows + ROW_BLOCK - 1) / ROW_BLOCK * groups);
}

/* y = (z - max z) / T, lanes behind the vocabulary set to -inf. */
INLINE v16 scaled(const float *z, long vocab, long at, v16 top, v16 inverse) {
    if (at + LANES <= vocab) return mul16(sub16(load16(z + at), top), inverse);
    return keep_part(mul16(sub16(load_part(z + at, vocab - at, 0.0f), top), inverse), vocab - at, -INFINITY);
}

static float row_maximum(const float *z, long vocab) {
    v16 top = set16(-INFINITY);
    long at = 0;
    for (; at + LANES <= vocab; at += LANES) top = max16(load16(z + at), top);
    if (at < vocab) top = max16(load_part(z + at, vocab - at, -INFINITY), top);
    return max_lanes(top);
}

#define CHUNK (8 * LANES) /* ids of one partial sum */

/* Sum of exp(y), and of exp(y) * y into *weighted: within a chunk of ids 16 lane sums and a fixed tree in float32, chunks in
 * float64. chunks[i] is the sum up to the end of chunk i. */
static double partition(const float *z, long vocab, v16 top, v16 inverse, double *chunks, double *weighted) {
    double total = 0.0, product = 0.0;
    for (long start = 0; start < vocab; start += CHUNK) {
        v16 sum = set16(0.0f), dot = set16(0.0f);
        for (long at = start; at < start + CHUNK && at < vocab; at += LANES) {
            v16 y = scaled(z, vocab, at, top, inverse), e = exp16(y);
            sum = add16(sum, e);
            /* behind the vocabulary y is -inf and e is 0: their product would be NaN */
            if (weighted) dot = add16(dot, at + LANES <= vocab ? mul16(e, y) : keep_part(mul16(e, y), vocab - at, 0.0f));
        }
        total += sum_lanes(sum);
        product += weighted ? sum_lanes(dot) : 0.0f;
        if (chunks) chunks[start / CHUNK] = total;
    }
    if (weighted) *weighted = product;
    return total;
}

INLINE float log_probability(float z, float maximum, float inverse, double log_total) {
    return (float)((double)((z - maximum) * inverse) - log_total);
}

/* Log-probability of `target` and entropy (or NULL) of one row at `temperature`; 0 means 1. */
void score_row(const float *z, long vocab, float temperature, long target, float *logprob, float *entropy) {
    float maximum = row_maximum(z, vocab), inverse = temperature > 0 ? 1.0f / temperature : 1.0f;
    double weighted, total = partition(z, vocab, set16(maximum), set16(inverse), NULL, entropy ? &weighted : NULL),
                     log_total = log_d(total);
    *logprob = log_probability(z[target], maximum, inverse, log_total);
    if (entropy) *entropy = (float)(log_total - weighted / total);
}

/* Smallest id whose cumulated probability exceeds `uniform`; `chunks` are the sums that partition left. */
static long draw(const float *z, long vocab, v16 top, v16 inverse, double uniform, const double *chunks) {
    long count = (vocab + CHUNK - 1) / CHUNK, chunk = 0, last = -1;
    double goal = uniform * chunks[count - 1];
    if (!(goal >= 0)) return 0;
    while (chunk < count - 1 && !(chunks[chunk] > goal)) chunk++;
    while (chunk && !(chunks[chunk] > chunks[chunk - 1])) chunk--; /* rounding put the goal behind the last probable id */
    double sum = chunk ? chunks[chunk - 1] : 0.0;
    for (long at = chunk * CHUNK; at < (chunk + 1) * CHUNK && at < vocab; at += LANES) {
        float e[LANES];
        store16(e, exp16(scaled(z, vocab, at, top, inverse)));
        for (long i = 0; i < LANES && at + i < vocab; i++) {
            sum += e[i];
            if (e[i] > 0) last = at + i;
            if (sum > goal) return last;
        }
    }
    return last; /* the chunk's float32 sum was rounded up */
}

typedef struct {
    net *n;
    const float *logits, *temperature;
    long ld;
    const double *uniforms;
    int32_t *ids;
    const int64_t *targets;
    float *logprobs, *entropy;
} score_job;

static void sample_task(void *context, long row, int thread) {
    score_job *j = context;
    const float *z = j->logits + row * j->ld;
    long vocab = j->n->c.vocab, id = 0;
    float maximum = row_maximum(z, vocab), t = j->temperature[row], inverse = t > 0 ? 1.0f / t : 1.0f;
    double *chunks = pool_scratch(j->n->workers, thread), total = partition(z, vocab, set16(maximum), set16(inverse), chunks, NULL);
    if (t > 0)
        id = draw(z, vocab, set16(maximum), set16(inverse), j->uniforms[row], chunks);
    else
        while (id < vocab - 1 && z[id] != maximum) id++;
    if (!(total > 0)) id = 0; /* a row with NaN; its log-probability says so */
    j->ids[row] = (int32_t)id;
    j->logprobs[row] = log_probability(z[id], maximum, inverse, log_d(total));
}

/* Sample one id per row: logits [rows][ld], temperature [rows] (0: greedy), uniforms [rows] in [0, 1). */
int strop_sample(net *n, const float *logits, long ld, long rows, const double *uniforms, const float *temperature, int32_t *ids,
                 float *logprobs) {
    if (pool_reserve(n->workers, sizeof(double) * (size_t)(n->Vp / CHUNK + 1))) return -1;
    unsigned saved = pool_enter();
    score_job job = {
        .n = n, .logits = logits, .ld = ld, .uniforms = uniforms, .temperature = temperature, .ids = ids, .logprobs = logprobs};
    pool_run(n->workers, sample_task, &job, rows);
    pool_leave(saved);
    return 0;
}

static void score_task(void *context, long row, int thread) {
    (void)thread;
    score_job *j = context;
    score_row(j->logits + row * j->ld, j->n->c.vocab, j->temperature[row], j->targets[row], &j->logprobs[row], &j->entropy[row]);
}

int strop_score(net *n, const float *logits, long ld, long rows, const int64_t *targets, const float *temperature, float *logprobs,
                float *entropy) {
    unsigned saved = pool_enter();
    score_job job = {
        .n = n, .logits = logits, .ld = ld, .targets = targets, .temperature = temperature, .logprobs = logprobs, .entropy = entropy};
    pool_run(n->workers, score_task, &job, rows);
    pool_leave(saved);
    return 0;
}
