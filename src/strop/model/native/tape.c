#include "tape.h"

#include <stdlib.h>

typedef struct {
    int64_t rows, streams, wants;
    const int32_t *tokens;
    const int64_t *lengths; /* [streams], sums to rows */
    const int32_t *want;    /* [W] */
    const int64_t *targets; /* [W] */
    const int64_t *forced;  /* [R][L][K] or NULL */
    float temperature;
} train_batch;

typedef struct {
    char *at;
    size_t used;
} carve;

static void *take(carve *c, size_t bytes) {
    void *r = c->at ? c->at + c->used : NULL;
    c->used += (bytes + 63) / 64 * 64;
    return r;
}

static float *floats(carve *c, long count) { return take(c, sizeof(float) * (size_t)count); }
static int32_t *ints(carve *c, long count) { return take(c, sizeof(int32_t) * (size_t)count); }
static int64_t *longs(carve *c, long count) { return take(c, sizeof(int64_t) * (size_t)count); }

static void carve_layer(const net *n, carve *c, long rows, layer_state *s) {
    long K = n->c.top_k;
    s->x = floats(c, rows * n->Dp);
    s->raw = floats(c, rows * n->Nqkv);
    s->q = floats(c, rows * n->Hq);
    s->lse = floats(c, rows * n->c.heads);
    s->attn = floats(c, rows * n->Hq);
    s->mid = floats(c, rows * n->Dp);
    s->normed = floats(c, rows * n->Dp);
    s->logits = floats(c, rows * n->Ep);
    s->weight = floats(c, rows * K);
    s->ids = ints(c, rows * K);
    s->slot = ints(c, rows * K);
    s->order = ints(c, rows * K);
    s->starts = longs(c, n->c.experts + 1);
    s->gate_up = floats(c, rows * K * 2 * n->Fp);
    s->out = floats(c, rows * K * n->Dp);
}

/* Blocks of the longest stream. */
static long width_of(const train_batch *in) {
    long longest = 0;
    for (long s = 0; s < in->streams; s++) longest = in->lengths[s] > longest ? in->lengths[s] : longest;
    return pad16(longest) / LANES;
}

/* Lay the tape out at `at` (NULL: only count). */
static size_t carve_tape(const net *n, const train_batch *in, long blocks, tape *t, layer_state *layers, char *at) {
    carve c = {at, 0};
    long R = in->rows;
    take(&c, sizeof(tape));
    t->layer = take(&c, sizeof(layer_state) * (size_t)n->c.layers);
    t->tokens = ints(&c, R);
    t->positions = ints(&c, R);
    t->slots = ints(&c, R);
    t->want = ints(&c, in->wants);
    t->first = longs(&c, in->streams + 1);
    t->table = ints(&c, in->streams * width_of(in));
    t->targets = longs(&c, in->wants);
    t->active = take(&c, (size_t)R);
    t->keys = floats(&c, n->c.layers * n->c.kv_heads * blocks * LANES * n->Cp);
    t->values = floats(&c, n->c.layers * n->c.kv_heads * blocks * LANES * n->Cp);
    t->last = floats(&c, in->wants * n->Dp);
    t->hidden = floats(&c, in->wants * n->Dp);
    t->logprobs = floats(&c, in->wants);
    t->entropy = floats(&c, in->wants);
    t->scores = (int64_t)sizeof(float) * in->wants * n->Vp <= n->c.kept_scores ? floats(&c, in->wants * n->Vp) : NULL;
    for (int i = 0; i < n->c.layers; i++) carve_layer(n, &c, R, at ? &t->layer[i] : &layers[0]);
    return c.used;
}

static void fill_tape(const train_batch *in, long blocks, tape *t) {
    memcpy(t->tokens, in->tokens, sizeof(int32_t) * (size_t)in->rows);
    memcpy(t->want, in->want, sizeof(int32_t) * (size_t)in->wants);
    memcpy(t->targets, in->targets, sizeof(int64_t) * (size_t)in->wants);
    memset(t->active, 0, (size_t)in->rows);
    for (long i = 0; i < in->wants; i++) t->active[in->want[i]] = 1;
    t->streams = in->streams;
    t->temperature = in->temperature;
    t->longest = 0;
    long row = 0, block = 0, width = width_of(in);
    for (long s = 0; s < in->streams; s++) {
        t->first[s] = row;
        for (long i = 0; i * LANES < in->lengths[s]; i++) t->table[s * width + i] = (int32_t)block++;
        t->longest = in->lengths[s] > t->longest ? in->lengths[s] : t->longest;
        for (long i = 0; i < in->lengths[s]; i++, row++) {
            t->positions[row] = (int32_t)i;
            t->slots[row] = (int32_t)s;
        }
    }
    t->first[in->streams] = row;
    kv_store kv = {t->keys, t->values, t->table, width, blocks};
    t->b = (row_batch){in->rows, t->tokens, t->positions, t->slots, kv, in->wants, t->want};
}

static tape *tape_new(net *n, const train_batch *in) {
    long blocks = 0;
    for (long s = 0; s < in->streams; s++) blocks += pad16(in->lengths[s]) / LANES;
    tape counted;
    layer_state layer;
    size_t bytes = carve_tape(n, in, blocks, &counted, &layer, NULL);
    tape *t = n->free_tape;
    n->free_tape = NULL;
    /* The last tape's memory is used again where it fits: fresh pages cost more than the arithmetic on them. So a small pass between two
     * large ones, as measurements are, must not give the large one's pages back. */
    if (t && t->bytes < bytes) {
        free(t);
        t = NULL;
    }
    if (!t) {
        t = big_alloc(bytes);
        if (!t) return NULL;
        t->bytes = bytes;
    }
    carve_tape(n, in, blocks, t, NULL, (char *)t);
    fill_tape(in, blocks, t);
    return t;
}

void strop_tape_release(net *n, tape *t) {
    if (!t) return;
    tape *kept = n->free_tape;
    if (kept && kept->bytes >= t->bytes) {
        free(t);
        return;
    }
    free(kept);
    n->free_tape = t;
}

/* Router logits [L][R][E] without padding. */
static void export_logits(const net *n, const tape *t, float *out) {
    for (long l = 0; l < n->c.layers; l++)
        for (long r = 0; r < t->b.rows; r++)
            memcpy(out + (l * t->b.rows + r) * n->c.experts, t->layer[l].logits + r * n->Ep, sizeof(float) * (size_t)n->c.experts);
}

/* Forward pass of training: the functions of inference, with everything kept for backward.
 * Returns a tape (give it to strop_tape_release), or NULL when memory is exhausted. */
tape *strop_train_forward(net *n, const train_batch *in, float *logprobs, float *entropy, float *router_logits, int32_t *chosen,
                          int32_t *natural) {
    tape *t = tape_new(n, in);
    if (!t || reserve_scratch(n, t->longest) || pool_reserve(n->workers, head_scratch(n))) {
        strop_tape_release(n, t);
        return NULL;
    }
    unsigned saved = pool_enter();
    embed_rows(n, &t->b, t->layer[0].x);
    layer_pass pass = {.n = n, .b = &t->b, .forced = in->forced, .chosen = chosen, .natural = natural, .block = ROW_BLOCK};
    for (int i = 0; i < n->c.layers; i++) {
        pass.index = i;
        pass.s = &t->layer[i];
        pass.previous = i ? &t->layer[i - 1] : NULL;
        pass.active = i == n->c.layers - 1 ? t->active : NULL; /* as in inference */
        layer_forward(&pass);
    }
    for (long i = 0; i < in->wants; i++) {
        combine_row(n, &t->layer[n->c.layers - 1], t->want[i], t->last + i * n->Dp);
        norm_row(t->last + i * n->Dp, n->norm, n->c.hidden, n->Dp, n->c.eps, t->hidden + i * n->Dp);
    }
    head_forward_train(n, t);
    memcpy(logprobs, t->logprobs, sizeof(float) * (size_t)in->wants);
    memcpy(entropy, t->entropy, sizeof(float) * (size_t)in->wants);
    export_logits(n, t, router_logits);
    pool_leave(saved);
    return t;
}
