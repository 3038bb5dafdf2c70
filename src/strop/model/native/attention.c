#include "net.h"

/* Causal attention of one query row over keys 0 .. p:
 *   score[t] = sum over c of q[c] * k[t, c]        (c ascending)
 *   m = max score;  e[t] = exp(score[t] - m);  z = 16 lane sums over t, then a fixed tree
 *   out[c] = (sum over t of e[t] * v[t, c]) / z    (t ascending)
 * Tiles take several rows at once only to share loads of K and V. */

typedef struct {
    long per_tile; /* heads that one tile takes */
    long queries;  /* queries of one tile */
} tile_plan;

static tile_plan plan(const net *n) {
    long heads = n->c.heads / n->c.kv_heads, parts = (heads + TILE - 1) / TILE;
    tile_plan p;
    p.per_tile = (heads + parts - 1) / parts;
    p.queries = TILE / p.per_tile;
    return p;
}

size_t attend_scratch(const net *n, long longest) { return sizeof(float) * (size_t)(TILE * (pad16(longest) + LANES + 2 * n->Cp)); }

/* Scores to exponentials in place over t < keys, zeros behind up to the next multiple of 16. Returns the sum, and the maximum. */
static float exponentials(float *score, long keys, float *maximum) {
    long full = keys / LANES, rest = keys % LANES;
    v16 m = set16(-INFINITY);
    for (long b = 0; b < full; b++) m = max16(load16(score + b * LANES), m);
    if (rest) m = max16(keep_part(load16(score + full * LANES), rest, -INFINITY), m);
    *maximum = max_lanes(m);
    v16 top = set16(*maximum), sum = set16(0.0f);
    for (long b = 0; b < full; b++) {
        v16 e = exp16(sub16(load16(score + b * LANES), top));
        store16(score + b * LANES, e);
        sum = add16(sum, e);
    }
    if (rest) {
        v16 e = keep_part(exp16(sub16(load16(score + full * LANES), top)), rest, 0.0f);
        store16(score + full * LANES, e);
        sum = add16(sum, e);
    }
    return sum_lanes(sum);
}

/* Keys and values of one stream, layer and group. */
typedef struct {
    const float *k, *v;
    const int32_t *blocks;
} stream_kv;

/* Blocks from `at` on that lie one behind the other, at most up to `end`. */
static long run_length(const stream_kv *s, long at, long end) {
    long n = 1;
    while (at + n < end && s->blocks[at + n] == s->blocks[at] + n) n++;
    return n;
}

/* out[rows][Cp] = (add: goes on with out +) sum over t in [from, to) of weight[row][t] * v[t]. */
static void weighted_values(const net *n, const stream_kv *s, long rows, const float *weight, long ld, long from, long to, float *out,
                            int goes_on) {
    long Cp = n->Cp, end = (to + LANES - 1) / LANES;
    for (long t = from; t < to; goes_on = 1) {
        long block = t / LANES, stop = (block + run_length(s, block, end)) * LANES;
        if (stop > to) stop = to;
        const float *v = s->v + s->blocks[block] * LANES * Cp + t % LANES * Cp;
        gemm(rows, Cp / LANES, stop - t, weight + t, ld, v, Cp, LANES, out, Cp, goes_on ? CONTINUE : STORE);
        t = stop;
    }
}

/* One tile: `queries` consecutive rows of one slot, `heads` heads from `head` on, all of one group. */
static void attend_tile(const net *n, const stream_kv *s, const float *q, long queries, long head, long heads, long first_keys, float *out,
                        float *lse, float *scratch) {
    long Cp = n->Cp, rows = queries * heads, longest = first_keys + queries - 1, ld = pad16(longest) + LANES, end = pad16(longest) / LANES;
    float *qs = scratch, *os = qs + TILE * Cp, *score = os + TILE * Cp;
    float sum[TILE], top[TILE];
    for (long i = 0; i < queries; i++) memcpy(qs + i * heads * Cp, q + i * n->Hq + head * Cp, sizeof(float) * (size_t)(heads * Cp));
    for (long b = 0, count; b < end; b += count) {
        count = run_length(s, b, end);
        gemm(rows, count, Cp, qs, Cp, s->k + s->blocks[b] * LANES * Cp, LANES, Cp * LANES, score + b * LANES, ld, STORE);
    }
    for (long r = 0; r < rows; r++) sum[r] = exponentials(score + r * ld, first_keys + r / heads, &top[r]);
    weighted_values(n, s, rows, score, ld, 0, first_keys, os, 0);
    for (long i = 1; i < queries; i++)
        weighted_values(n, s, heads, score + i * heads * ld, ld, first_keys, first_keys + i, os + i * heads * Cp, 1);
    for (long r = 0; r < rows; r++) {
        float *to = out + (r / heads) * n->Hq + (head + r % heads) * Cp;
        v16 z = set16(sum[r]);
        for (long c = 0; c < Cp; c += LANES) store16(to + c, div16(load16(os + r * Cp + c), z));
        if (lse) lse[(r / heads) * n->c.heads + head + r % heads] = top[r] + (float)log_d(sum[r]);
    }
}

/* Attention of rows [first, first + count): out [count][Hq]; lse [count][H] or NULL. */
void attend_rows(const net *n, const row_batch *b, int layer, const float *q, long first, long count, float *out, float *lse,
                 void *scratch) {
    tile_plan p = plan(n);
    const kv_store *kv = &b->kv;
    long G = n->c.kv_heads, per_group = n->c.heads / G;
    for (long g = 0; g < G; g++)
        for (long r = first; r < first + count;) {
            int32_t slot = b->slots[r];
            long same = 1;
            while (same < p.queries && r + same < first + count && b->slots[r + same] == slot) same++;
            stream_kv s = {kv_at(kv->k, kv, n->Cp, G, layer, g, 0), kv_at(kv->v, kv, n->Cp, G, layer, g, 0), kv->table + slot * kv->width};
            for (long h = 0; h < per_group; h += p.per_tile) {
                long heads = per_group - h < p.per_tile ? per_group - h : p.per_tile, head = g * per_group + h;
                attend_tile(n, &s, q + r * n->Hq, same, head, heads, b->positions[r] + 1, out + (r - first) * n->Hq,
                            lse ? lse + (r - first) * n->c.heads : NULL, scratch);
            }
            r += same;
        }
}

/* ---------------------------------------------------------------------------------------------------------------- backward */

#define KEYS 96    /* keys of one block */
#define QUERIES 48 /* query rows (queries x heads) of one block */

/* Query rows of one block: all heads of a group stay together. */
static long block_rows(const net *n) {
    long heads = n->c.heads / n->c.kv_heads;
    return pad16(heads > QUERIES ? heads : QUERIES);
}

size_t attend_backward_scratch(const net *n, long longest) {
    long span = pad16(longest) + KEYS, rows = block_rows(n);
    return sizeof(float) * (size_t)(4 * span * n->Cp + rows * (3 * n->Cp + 2 * KEYS + 2));
}

typedef struct {
    long heads, span;
    float *k_rows, *v_lanes, *d_k, *d_v, *q, *d_o, *d_q, *p, *ds, *lse, *delta;
} backward_room;

static backward_room lay_out(const net *n, long longest, float *at) {
    long span = pad16(longest) + KEYS, Cp = n->Cp, rows = block_rows(n);
    backward_room m = {.heads = n->c.heads / n->c.kv_heads, .span = span};
    float **parts[] = {&m.k_rows, &m.v_lanes, &m.d_k, &m.d_v, &m.q, &m.d_o, &m.d_q, &m.p, &m.ds, &m.lse, &m.delta};
    long sizes[] = {span * Cp, span * Cp, span * Cp, span * Cp, rows * Cp, rows * Cp, rows * Cp, rows * KEYS, rows * KEYS, rows, rows};
    for (int i = 0; i < 11; i++) {
        *parts[i] = at;
        at += sizes[i];
    }
    return m;
}

/* P and dS of one block of query rows against keys [start, start + KEYS); rows beyond a row's own position become 0. */
static void block_scores(const net *n, const backward_room *m, const float *k, long rows, long first_position, long start, long keys) {
    long Cp = n->Cp, panels = pad16(keys) / LANES;
    gemm(rows, panels, Cp, m->q, Cp, k + start * Cp, LANES, Cp * LANES, m->p, KEYS, STORE);
    gemm(rows, panels, Cp, m->d_o, Cp, m->v_lanes + start * Cp, LANES, Cp * LANES, m->ds, KEYS, STORE);
    for (long r = 0; r < rows; r++) {
        v16 lse = set16(m->lse[r]), delta = set16(m->delta[r]);
        long seen = first_position + r / m->heads + 1 - start;
        for (long t = 0; t < pad16(keys); t += LANES) {
            float *p = m->p + r * KEYS + t, *ds = m->ds + r * KEYS + t;
            if (seen <= t) {
                store16(p, set16(0.0f));
                store16(ds, set16(0.0f));
                continue;
            }
            v16 e = exp16(sub16(load16(p), lse)), d = mul16(e, sub16(load16(ds), delta));
            if (seen < t + LANES) {
                e = keep_part(e, seen - t, 0.0f);
                d = keep_part(d, seen - t, 0.0f);
            }
            store16(p, e);
            store16(ds, d);
        }
    }
}

static void gather_queries(const net *n, const backward_room *m, const layer_state *s, const float *d_out, long row, long queries,
                           long group) {
    long Cp = n->Cp, H = m->heads;
    for (long r = 0; r < queries * H; r++) {
        long at = (row + r / H) * n->Hq + (group * H + r % H) * Cp;
        memcpy(m->q + r * Cp, s->q + at, sizeof(float) * (size_t)Cp);
        memcpy(m->d_o + r * Cp, d_out + at, sizeof(float) * (size_t)Cp);
        v16 dot = set16(0.0f);
        for (long c = 0; c < Cp; c += LANES) dot = fma16(load16(d_out + at + c), load16(s->attn + at + c), dot);
        m->delta[r] = sum_lanes(dot);
        m->lse[r] = s->lse[(row + r / H) * n->c.heads + group * H + r % H];
    }
    memset(m->d_q, 0, sizeof(float) * (size_t)(queries * H * Cp));
}

/* Gradient of one stream (rows [first, first + count), positions 0 .. count-1) and one key-value head, into the rotated
 * queries, keys and values of d_qkv [R][Nqkv]. Source: Dao, arXiv 2307.08691, algorithm 2. */
void attend_backward(const net *n, const row_batch *b, int layer, const layer_state *s, const float *d_out, float *d_qkv, long first,
                     long count, long group, void *scratch) {
    backward_room m = lay_out(n, count, scratch);
    long Cp = n->Cp, per_block = QUERIES / m.heads ? QUERIES / m.heads : 1;
    long block = b->kv.table[b->slots[first] * b->kv.width]; /* a tape's blocks lie one behind the other */
    const float *k = kv_at(b->kv.k, &b->kv, Cp, n->c.kv_heads, layer, group, block),
                *v = kv_at(b->kv.v, &b->kv, Cp, n->c.kv_heads, layer, group, block);
    memset(m.k_rows, 0, sizeof(float) * (size_t)(4 * m.span * Cp));
    for (long t = 0; t < count; t++)
        for (long c = 0; c < Cp; c++) {
            long lane = (t / LANES * Cp + c) * LANES + t % LANES;
            m.k_rows[t * Cp + c] = k[lane];
            m.v_lanes[lane] = v[t * Cp + c];
        }
    for (long i = 0; i < count; i += per_block) {
        long queries = count - i < per_block ? count - i : per_block, rows = queries * m.heads;
        gather_queries(n, &m, s, d_out, first + i, queries, group);
        for (long start = 0; start < i + queries; start += KEYS) {
            long keys = i + queries - start < KEYS ? i + queries - start : KEYS;
            block_scores(n, &m, k, rows, i, start, keys);
            gemm_t(keys, Cp / LANES, rows, m.p, KEYS, m.d_o, Cp, LANES, m.d_v + start * Cp, Cp, ADD);
            gemm_t(keys, Cp / LANES, rows, m.ds, KEYS, m.q, Cp, LANES, m.d_k + start * Cp, Cp, ADD);
            gemm(rows, Cp / LANES, keys, m.ds, KEYS, m.k_rows + start * Cp, Cp, LANES, m.d_q, Cp, ADD);
        }
        for (long r = 0; r < rows; r++) {
            float *to = d_qkv + (first + i + r / m.heads) * n->Nqkv + (group * m.heads + r % m.heads) * Cp;
            for (long c = 0; c < Cp; c++) to[c] = m.d_q[r * Cp + c] * n->scale;
        }
    }
    for (long t = 0; t < count; t++) {
        float *to = d_qkv + (first + t) * n->Nqkv + n->Hq + group * Cp;
        memcpy(to, m.d_k + t * Cp, sizeof(float) * (size_t)Cp);
        memcpy(to + n->c.kv_heads * Cp, m.d_v + t * Cp, sizeof(float) * (size_t)Cp);
    }
}
