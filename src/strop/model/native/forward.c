#include "net.h"

#include <stdlib.h>

/* Scratch of every thread, enough for any phase over streams of at most `longest` tokens. */
int reserve_scratch(net *n, long longest) {
    long width = n->Dp + n->Nqkv > n->Dp + 3 * n->Fp ? n->Dp + n->Nqkv : n->Dp + 3 * n->Fp;
    size_t floats = (size_t)(ROW_BLOCK * (width + n->Hq + n->Ep + n->Dp));
    return pool_reserve(n->workers, sizeof(float) * floats + attend_scratch(n, longest));
}

float norm_row(const float *x, const float *gain, long dim, long padded, float eps, float *out) {
    v16 sum = set16(0.0f);
    for (long i = 0; i < padded; i += LANES) sum = fma16(load16(x + i), load16(x + i), sum);
    float inverse = 1.0f / sqrtf(sum_lanes(sum) / (float)dim + eps);
    v16 scale = set16(inverse);
    for (long i = 0; i < padded; i += LANES) store16(out + i, mul16(mul16(load16(x + i), scale), load16(gain + i)));
    return inverse;
}

/* Rotary position, half-split layout. Source: Su et al., arXiv 2104.09864, eq. 34. x and out may be the same. */
void rotate_head(const net *n, const float *x, long position, float *out) {
    long half = n->c.head_dim / 2;
    const float *c = n->cos + position * half, *s = n->sin + position * half;
    for (long i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        out[i] = a * c[i] - b * s[i];
        out[i + half] = b * c[i] + a * s[i];
    }
}

/* out = mid + sum of the chosen experts' outputs, ascending by expert. */
void combine_row(const net *n, const layer_state *s, long row, float *out) {
    long K = n->c.top_k, Dp = n->Dp;
    const int32_t *slot = s->slot + row * K;
    const float *weight = s->weight + row * K, *mid = s->mid + row * Dp;
    for (long d = 0; d < Dp; d += LANES) {
        v16 acc = mul16(set16(weight[0]), load16(s->out + slot[0] * Dp + d));
        for (long k = 1; k < K; k++) acc = fma16(set16(weight[k]), load16(s->out + slot[k] * Dp + d), acc);
        store16(out + d, add16(load16(mid + d), acc));
    }
}

void embed_rows(const net *n, const row_batch *b, float *x) {
    for (long r = 0; r < b->rows; r++) memcpy(x + r * n->Dp, n->embed + b->tokens[r] * n->Dp, sizeof(float) * (size_t)n->Dp);
}

static void write_kv(const net *n, const layer_pass *p, long row, const float *raw, float *head) {
    const layer_weights *w = &n->layer[p->index];
    const kv_store *kv = &p->b->kv;
    long Cp = n->Cp, G = n->c.kv_heads, position = p->b->positions[row], block = kv->table[p->b->slots[row] * kv->width + position / LANES];
    for (long g = 0; g < G; g++) {
        norm_row(raw + n->Hq + g * Cp, w->k_norm, n->c.head_dim, Cp, n->c.eps, head);
        rotate_head(n, head, position, head);
        float *lane = kv_at(kv->k, kv, Cp, G, p->index, g, block) + position % LANES;
        for (long c = 0; c < Cp; c++) lane[c * LANES] = head[c];
        memcpy(kv_at(kv->v, kv, Cp, G, p->index, g, block) + position % LANES * Cp, raw + n->Hq + (n->c.kv_heads + g) * Cp,
               sizeof(float) * (size_t)Cp);
    }
}

/* Input of the layer, norm, projections, query and key norm, rotation, cache. */
static void project_task(void *context, long task, int thread) {
    layer_pass *p = context;
    const net *n = p->n;
    layer_state *s = p->s;
    const layer_weights *w = &n->layer[p->index];
    long Dp = n->Dp, Cp = n->Cp, first = task * p->block, count = p->b->rows - first < p->block ? p->b->rows - first : p->block;
    float *normed = pool_scratch(n->workers, thread), *raw = s->raw ? s->raw + first * n->Nqkv : normed + ROW_BLOCK * Dp;
    for (long i = 0; i < count; i++) {
        float *x = s->x + (first + i) * Dp;
        if (p->previous) combine_row(n, p->previous, first + i, x);
        norm_row(x, w->input_norm, n->c.hidden, Dp, n->c.eps, normed + i * Dp);
    }
    gemm(count, n->Nqkv / LANES, n->c.hidden, normed, Dp, w->qkv, LANES, n->c.hidden * LANES, raw, n->Nqkv, STORE);
    v16 scale = set16(n->scale);
    for (long i = 0; i < count; i++) {
        float *q = s->q + (first + i) * n->Hq;
        const float *from = raw + i * n->Nqkv;
        for (long h = 0; h < n->c.heads; h++) {
            norm_row(from + h * Cp, w->q_norm, n->c.head_dim, Cp, n->c.eps, q + h * Cp);
            rotate_head(n, q + h * Cp, p->b->positions[first + i], q + h * Cp);
            for (long c = h * Cp; c < (h + 1) * Cp; c += LANES) store16(q + c, mul16(load16(q + c), scale));
        }
        write_kv(n, p, first + i, from, normed);
    }
}

static void route_rows(layer_pass *p, long first, long count) {
    const net *n = p->n;
    layer_state *s = p->s;
    long K = n->c.top_k, D = n->c.hidden;
    gemm(count, n->Ep / LANES, D, s->normed + first * n->Dp, n->Dp, n->layer[p->index].router, LANES, D * LANES, s->logits + first * n->Ep,
         n->Ep, STORE);
    for (long r = first; r < first + count; r++) {
        long at = (r * n->c.layers + p->index) * K;
        route_row(n, s->logits + r * n->Ep, p->forced ? p->forced + at : NULL, s->ids + r * K, p->natural ? p->natural + at : NULL,
                  s->weight + r * K);
        memcpy(p->chosen + at, s->ids + r * K, sizeof(int32_t) * (size_t)K);
    }
}

/* Attention, output projection, second norm, router. */
static void attend_task(void *context, long task, int thread) {
    layer_pass *p = context;
    net *n = p->n;
    layer_state *s = p->s;
    const layer_weights *w = &n->layer[p->index];
    long Dp = n->Dp, first = task * p->block, count = p->b->rows - first < p->block ? p->b->rows - first : p->block;
    float *scratch = pool_scratch(n->workers, thread), *out = s->attn ? s->attn + first * n->Hq : scratch,
          *projected = scratch + ROW_BLOCK * n->Hq;
    attend_rows(n, p->b, p->index, s->q, first, count, out, s->lse ? s->lse + first * n->c.heads : NULL, projected + ROW_BLOCK * Dp);
    gemm(count, Dp / LANES, n->Hq, out, n->Hq, w->o, LANES, n->Hq * LANES, projected, Dp, STORE);
    for (long i = 0; i < count; i++) {
        const float *x = s->x + (first + i) * Dp;
        float *mid = s->mid + (first + i) * Dp;
        for (long d = 0; d < Dp; d += LANES) store16(mid + d, add16(load16(x + d), load16(projected + i * Dp + d)));
        norm_row(mid, w->post_norm, n->c.hidden, Dp, n->c.eps, s->normed + (first + i) * Dp);
    }
    route_rows(p, first, count);
}

void layer_forward(layer_pass *p) {
    long tasks = (p->b->rows + p->block - 1) / p->block;
    pool_run(p->n->workers, project_task, p, tasks);
    pool_run(p->n->workers, attend_task, p, tasks);
    group_by_expert(p->n, p->b->rows, p->active, p->s);
    experts_forward(p->n, p->index, p->s);
}

static size_t inference_bytes(const net *n, long rows, long wants, layer_state *s, float **hidden, uint8_t **active, char *at) {
    long K = n->c.top_k;
    size_t used = 0;
    struct {
        void **field;
        size_t bytes;
    } parts[] = {
        {(void **)&s->x, sizeof(float) * (size_t)(rows * n->Dp)},
        {(void **)&s->q, sizeof(float) * (size_t)(rows * n->Hq)},
        {(void **)&s->normed, sizeof(float) * (size_t)(rows * n->Dp)},
        {(void **)&s->logits, sizeof(float) * (size_t)(rows * n->Ep)},
        {(void **)&s->weight, sizeof(float) * (size_t)(rows * K)},
        {(void **)&s->ids, sizeof(int32_t) * (size_t)(rows * K)},
        {(void **)&s->slot, sizeof(int32_t) * (size_t)(rows * K)},
        {(void **)&s->order, sizeof(int32_t) * (size_t)(rows * K)},
        {(void **)&s->starts, sizeof(int64_t) * (size_t)(n->c.experts + 1)},
        {(void **)&s->out, sizeof(float) * (size_t)(rows * K * n->Dp)},
        {(void **)hidden, sizeof(float) * (size_t)(wants * n->Dp)},
        {(void **)active, (size_t)rows},
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        *parts[i].field = at ? at + used : NULL;
        used += (parts[i].bytes + 63) / 64 * 64;
    }
    s->mid = s->x;
    return used;
}

/* One step of inference. kv arrays have n->c.layers layers; logits is [W][Vp]; chosen is [R][L][K].
 * Returns 0, or -1 when memory is exhausted. */
int strop_infer(net *n, const row_batch *b, float *logits, int32_t *chosen) {
    layer_state s = {0};
    float *hidden;
    uint8_t *active;
    size_t bytes = inference_bytes(n, b->rows, b->wants, &s, &hidden, &active, NULL);
    long longest = 0;
    for (long r = 0; r < b->rows; r++) longest = b->positions[r] >= longest ? b->positions[r] + 1 : longest;
    if (bytes > n->buffer_bytes) {
        free(n->buffer);
        n->buffer = big_alloc(bytes);
        n->buffer_bytes = n->buffer ? bytes : 0;
    }
    if (!n->buffer || reserve_scratch(n, longest)) return -1;
    unsigned saved = pool_enter();
    inference_bytes(n, b->rows, b->wants, &s, &hidden, &active, n->buffer);
    memset(active, 0, (size_t)b->rows);
    for (long i = 0; i < b->wants; i++) active[b->want[i]] = 1;
    embed_rows(n, b, s.x);
    long spread = (b->rows + 2 * pool_threads(n->workers) - 1) / (2 * pool_threads(n->workers));
    layer_pass pass = {.n = n, .b = b, .s = &s, .chosen = chosen, .block = spread < ROW_BLOCK ? spread : ROW_BLOCK};
    for (int i = 0; i < n->c.layers; i++) {
        pass.index = i;
        pass.previous = i ? &s : NULL;
        pass.active = i == n->c.layers - 1 ? active : NULL; /* nothing reads the other rows' last layer */
        layer_forward(&pass);
    }
    for (long i = 0; i < b->wants; i++) {
        combine_row(n, &s, b->want[i], hidden + i * n->Dp);
        norm_row(hidden + i * n->Dp, n->norm, n->c.hidden, n->Dp, n->c.eps, hidden + i * n->Dp);
    }
    head_logits(n, hidden, b->wants, logits);
    pool_leave(saved);
    return 0;
}
