// Rotary position embedding: angles of positions, and the rotation of heads in place.

// grid: (pairs / blockDim, tokens). out [tokens, pairs, 2]: cosine and sine, both times scale.
extern "C" __global__ void rope_angles(const int* positions, const float* inv_freq, float* out,
                                       int pairs, float scale) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= pairs) return;
  // The angle is a float32 product; its cosine and sine are exact to the last bit by way of double.
  const float angle = __fmul_rn(static_cast<float>(positions[blockIdx.y]), inv_freq[i]);
  double sine, cosine;
  sincos(static_cast<double>(angle), &sine, &cosine);
  float2* pair = reinterpret_cast<float2*>(out) + static_cast<long long>(blockIdx.y) * pairs + i;
  *pair = make_float2(__fmul_rn(static_cast<float>(cosine), scale),
                      __fmul_rn(static_cast<float>(sine), scale));
}

// grid: (heads * pairs / blockDim, tokens). apart: 1 for neighbours, else pair i is (i, i + apart).
extern "C" __global__ void rope_rotate(float* x, const float* angles, int heads, int head_dim,
                                       int pairs, int apart) {
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= heads * pairs) return;
  const int head = at / pairs, i = at % pairs;
  const long long token = blockIdx.y;
  const float2 turn = reinterpret_cast<const float2*>(angles)[token * pairs + i];
  float* first = x + (token * heads + head) * head_dim + (apart == 1 ? 2 * i : i);
  float* second = first + apart;
  const float a = *first, b = *second;
  *first = a * turn.x - b * turn.y;
  *second = a * turn.y + b * turn.x;
}
