#include "tape.h"

/* Gradient of the router's logits from those of the chosen experts' weights; the choice itself is constant. */
void route_row_backward(const net *n, const float *logits, const int32_t *ids, const float *weight, const float *d_weight,
                        float *d_logits) {
    const net_config *c = &n->c;
    float mean = 0.0f;
    for (int k = 0; k < c->top_k; k++) mean += weight[k] * d_weight[k];
    if (c->norm_topk) {
        memset(d_logits, 0, sizeof(float) * (size_t)n->Ep);
    } else {
        float e[MAX_EXPERTS], top = logits[0], sum = 0.0f;
        for (int j = 1; j < c->experts; j++) top = logits[j] > top ? logits[j] : top;
        router_exponentials(n, logits, top, e);
        for (int j = 0; j < c->experts; j++) sum += e[j];
        for (long j = 0; j < n->Ep; j++) d_logits[j] = j < c->experts ? -(e[j] / sum) * mean : 0.0f;
    }
    for (int k = 0; k < c->top_k; k++) d_logits[ids[k]] += c->norm_topk ? weight[k] * (d_weight[k] - mean) : weight[k] * d_weight[k];
}

/* gate_up [2Fp] and d_hidden [Fp] to hidden [Fp] and d_gate_up [2Fp]. */
static void gated_row_backward(const float *gate_up, const float *d_hidden, long padded, float *hidden, float *d_gate_up) {
    v16 one = set16(1.0f), zero = set16(0.0f);
    for (long f = 0; f < padded; f += LANES) {
        v16 g = load16(gate_up + f), u = load16(gate_up + padded + f), d = load16(d_hidden + f);
        v16 s = div16(one, add16(one, exp16(sub16(zero, g)))), silu = mul16(g, s);
        store16(hidden + f, mul16(silu, u));
        v16 slope = mul16(s, fma16(g, sub16(one, s), one));
        store16(d_gate_up + f, mul16(mul16(d, u), slope));
        store16(d_gate_up + padded + f, mul16(d, silu));
    }
}

typedef struct {
    float *x, *d_out, *hidden, *d_hidden, *d_gate_up, *w_gate_up, *w_down;
} expert_room;

static size_t lay_out(const net *n, float *at, expert_room *m) {
    float **parts[] = {&m->x, &m->d_out, &m->hidden, &m->d_hidden, &m->d_gate_up, &m->w_gate_up, &m->w_down};
    long sizes[] = {EXPERT_ROWS * n->Dp,     EXPERT_ROWS * n->Dp, EXPERT_ROWS * n->Fp, EXPERT_ROWS * n->Fp,
                    EXPERT_ROWS * 2 * n->Fp, 2 * n->Fp * n->Dp,   n->Dp * n->Fp};
    size_t used = 0;
    for (int i = 0; i < 7; i++) {
        *parts[i] = at ? at + used : NULL;
        used += (size_t)sizes[i];
    }
    return used;
}

size_t experts_backward_scratch(const net *n) {
    expert_room m;
    return sizeof(float) * lay_out(n, NULL, &m);
}

/* Inputs, weighted output gradients and the gradients of the weights of slots [first, first + rows). */
static void gather(backward_pass *p, const expert_room *m, long first, long rows) {
    const net *n = p->n;
    const layer_state *s = &p->t->layer[p->index];
    for (long i = 0; i < rows; i++) {
        long choice = s->order[first + i], row = choice / n->c.top_k;
        const float *dx = p->room.dx + row * n->Dp, *out = s->out + (first + i) * n->Dp;
        memcpy(m->x + i * n->Dp, s->normed + row * n->Dp, sizeof(float) * (size_t)n->Dp);
        v16 dot = set16(0.0f), w = set16(s->weight[choice]);
        for (long d = 0; d < n->Dp; d += LANES) {
            v16 g = load16(dx + d);
            dot = fma16(g, load16(out + d), dot);
            store16(m->d_out + i * n->Dp + d, mul16(w, g));
        }
        p->room.d_weight[choice] = sum_lanes(dot);
    }
}

static void write_expert(const backward_pass *p, const expert_room *m, long e) {
    const net *n = p->n;
    long D = n->c.hidden, F = n->c.expert_size;
    raw_layer *g = &p->grads->layers[p->index];
    for (long half = 0; half < 2; half++)
        for (long f = 0; f < F; f++)
            memcpy(g->gate_up + ((e * 2 + half) * F + f) * D, m->w_gate_up + (half * n->Fp + f) * n->Dp, sizeof(float) * (size_t)D);
    for (long d = 0; d < D; d++) memcpy(g->down + (e * D + d) * F, m->w_down + d * n->Fp, sizeof(float) * (size_t)F);
}

/* One expert, all its rows: no two tasks add to the same sum, so the order is fixed. */
static void expert_backward_task(void *context, long task, int thread) {
    backward_pass *p = context;
    net *n = p->n;
    layer_state *s = &p->t->layer[p->index];
    const layer_weights *w = &n->layer[p->index];
    long D = n->c.hidden, Dp = n->Dp, Fp = n->Fp, e = p->room.by_size[task];
    expert_room m;
    lay_out(n, pool_scratch(n->workers, thread), &m);
    memset(m.w_gate_up, 0, sizeof(float) * (size_t)(3 * Fp * Dp));
    for (long first = s->starts[e]; first < s->starts[e + 1]; first += EXPERT_ROWS) {
        long rows = s->starts[e + 1] - first < EXPERT_ROWS ? s->starts[e + 1] - first : EXPERT_ROWS;
        gather(p, &m, first, rows);
        gemm(rows, Fp / LANES, D, m.d_out, Dp, w->down_t + e * Fp * D, LANES, D * LANES, m.d_hidden, Fp, STORE);
        for (long i = 0; i < rows; i++)
            gated_row_backward(s->gate_up + (first + i) * 2 * Fp, m.d_hidden + i * Fp, Fp, m.hidden + i * Fp, m.d_gate_up + i * 2 * Fp);
        gemm_t(D, Fp / LANES, rows, m.d_out, Dp, m.hidden, Fp, LANES, m.w_down, Fp, ADD);
        gemm_t(2 * Fp, Dp / LANES, rows, m.d_gate_up, 2 * Fp, m.x, Dp, LANES, m.w_gate_up, Dp, ADD);
        /* The outputs were read for the last time by gather: their place takes the gradient of the inputs. */
        gemm(rows, Dp / LANES, 2 * Fp, m.d_gate_up, 2 * Fp, w->gate_up_t + e * 2 * Fp * Dp, LANES, 2 * Fp * LANES, s->out + first * Dp, Dp,
             STORE);
    }
    write_expert(p, &m, e);
}

void experts_backward(backward_pass *p) {
    const layer_state *s = &p->t->layer[p->index];
    long E = p->n->c.experts, *order = p->room.by_size;
    for (long e = 0; e < E; e++) {
        long at = e, size = s->starts[e + 1] - s->starts[e];
        for (; at > 0 && s->starts[order[at - 1] + 1] - s->starts[order[at - 1]] < size; at--) order[at] = order[at - 1];
        order[at] = e;
    }
    pool_run(p->n->workers, expert_backward_task, p, E);
}
