#include "tape.h"

#define PANELS 16

size_t head_scratch(const net *n) { return sizeof(float) * (size_t)(HEAD_TASK * n->Vp); }

/* Logits of a few rows into [rows][Vp], the weights read once per group of panels. */
static void few_logits(const net *n, const float *hidden, long rows, float *logits) {
    long D = n->c.hidden, all = n->Vp / LANES;
    for (long p = 0; p < all; p += PANELS)
        gemm(rows, all - p < PANELS ? all - p : PANELS, D, hidden, n->Dp, n->head + p * LANES * D, LANES, LANES * D, logits + p * LANES,
             n->Vp, STORE);
}

typedef struct {
    net *n;
    tape *t;
} head_train;

static void forward_task(void *context, long task, int thread) {
    head_train *j = context;
    const net *n = j->n;
    tape *t = j->t;
    long first = task * HEAD_TASK, end = first + HEAD_TASK < t->b.wants ? first + HEAD_TASK : t->b.wants;
    float *z = t->scores ? t->scores + first * n->Vp : pool_scratch(n->workers, thread);
    few_logits(n, t->hidden + first * n->Dp, end - first, z);
    for (long i = first; i < end; i++, z += n->Vp) score_row(z, n->c.vocab, t->temperature, t->targets[i], &t->logprobs[i], &t->entropy[i]);
}

void head_forward_train(net *n, tape *t) {
    head_train job = {n, t};
    pool_run(n->workers, forward_task, &job, (t->b.wants + HEAD_TASK - 1) / HEAD_TASK);
}

/* Logits of wanted row i to their gradient in place: (g (1[j = target] - p_j) - h p_j (log p_j + H)) / T for gradients g of the
 * log-probability and h of the entropy H. */
static void score_row_backward(float *z, const net *n, const tape *t, long i, float g, float h) {
    float inverse = 1.0f / t->temperature, shift_by = z[t->targets[i]] * inverse - t->logprobs[i]; /* log of the partition function */
    long vocab = n->c.vocab;
    v16 shift = set16(shift_by), scale = set16(inverse), minus_g = set16(-g * inverse), minus_h = set16(-h * inverse),
        e = set16(t->entropy[i]);
    for (long j = 0; j < n->Vp; j += LANES) {
        v16 log_p = sub16(mul16(load16(z + j), scale), shift), p = exp16(log_p);
        v16 d = mul16(p, fma16(minus_h, add16(log_p, e), minus_g));
        store16(z + j, j + LANES <= vocab ? d : keep_part(d, vocab > j ? vocab - j : 0, 0.0f));
    }
    z[t->targets[i]] += g * inverse;
}

/* Score gradients of the chunk that begins at wanted row p->from. */
static float *chunk_scores(const backward_pass *p) { return p->t->scores ? p->t->scores + p->from * p->n->Vp : p->room.d_scores; }

static void scores_task(void *context, long task, int thread) {
    (void)thread;
    backward_pass *p = context;
    const net *n = p->n;
    const tape *t = p->t;
    long at = task * HEAD_TASK, first = p->from + at, end = p->from + HEAD_ROWS < t->b.wants ? p->from + HEAD_ROWS : t->b.wants;
    long rows = end - first < HEAD_TASK ? end - first : HEAD_TASK;
    float *z = chunk_scores(p) + at * n->Vp;
    if (!t->scores) few_logits(n, t->hidden + first * n->Dp, rows, z);
    for (long i = 0; i < rows; i++) score_row_backward(z + i * n->Vp, n, t, first + i, p->g_logprob[first + i], p->g_entropy[first + i]);
    gemm(rows, n->Dp / LANES, n->c.vocab, z, n->Vp, n->head_t, LANES, LANES * n->c.vocab, p->room.d_hidden + first * n->Dp, n->Dp, STORE);
}

static void head_weight_task(void *context, long task, int thread) {
    (void)thread;
    backward_pass *p = context;
    const net *n = p->n;
    long first = task * 2 * ROW_BLOCK, ids = n->c.vocab - first < 2 * ROW_BLOCK ? n->c.vocab - first : 2 * ROW_BLOCK;
    long rows = p->t->b.wants - p->from < HEAD_ROWS ? p->t->b.wants - p->from : HEAD_ROWS;
    gemm_t(ids, n->Dp / LANES, rows, chunk_scores(p) + first, n->Vp, p->t->hidden + p->from * n->Dp, n->Dp, LANES,
           p->room.d_head + first * n->Dp, n->Dp, ADD);
}

static void last_norm_task(void *context, long task, int thread) {
    (void)thread;
    backward_pass *p = context;
    const net *n = p->n;
    long first = task * ROW_BLOCK, rows = p->t->b.wants - first < ROW_BLOCK ? p->t->b.wants - first : ROW_BLOCK;
    float *gain = p->room.gains + task * n->Dp;
    memset(gain, 0, sizeof(float) * (size_t)n->Dp);
    for (long i = first; i < first + rows; i++) {
        float *d = p->room.d_hidden + i * n->Dp;
        norm_row_backward(p->t->last + i * n->Dp, n->norm, d, n->c.hidden, n->Dp, n->c.eps, d, gain);
    }
}

/* From gradients of log-probabilities and entropies to room.dx, room.d_head and the last norm's gain. */
void head_backward(backward_pass *p) {
    const net *n = p->n;
    const tape *t = p->t;
    for (p->from = 0; p->from < t->b.wants; p->from += HEAD_ROWS) {
        long rows = t->b.wants - p->from < HEAD_ROWS ? t->b.wants - p->from : HEAD_ROWS;
        pool_run(n->workers, scores_task, p, (rows + HEAD_TASK - 1) / HEAD_TASK);
        pool_run(n->workers, head_weight_task, p, (n->c.vocab + 2 * ROW_BLOCK - 1) / (2 * ROW_BLOCK));
    }
    long blocks = (t->b.wants + ROW_BLOCK - 1) / ROW_BLOCK;
    pool_run(n->workers, last_norm_task, p, blocks);
    sum_gains(p->room.gains, blocks, n->Dp, n->c.hidden, p->grads->norm);
    for (long i = 0; i < t->b.wants; i++) {
        float *dx = p->room.dx + t->want[i] * n->Dp;
        const float *d = p->room.d_hidden + i * n->Dp;
        for (long c = 0; c < n->Dp; c += LANES) store16(dx + c, add16(load16(dx + c), load16(d + c)));
    }
}
