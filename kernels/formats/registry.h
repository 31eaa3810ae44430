// All formats: a new one is a header, an include and an X() here.
#pragma once
#include "bf16.h"
#include "f16.h"
#include "f32.h"
#include "iq1_m.h"
#include "iq1_s.h"
#include "iq2_s.h"
#include "iq2_xs.h"
#include "iq2_xxs.h"
#include "iq3_s.h"
#include "iq3_xxs.h"
#include "iq4_nl.h"
#include "iq4_xs.h"
#include "mxfp4.h"
#include "nvfp4.h"
#include "q2_k.h"
#include "q3_k.h"
#include "q4_0.h"
#include "q4_1.h"
#include "q4_k.h"
#include "q5_0.h"
#include "q5_1.h"
#include "q5_k.h"
#include "q6_k.h"
#include "q8_0.h"
#include "tq1_0.h"
#include "tq2_0.h"

#define VP_FORMATS(X)                                                            \
  X(F32) X(F16) X(BF16) X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) X(Q2_K) X(Q3_K)  \
  X(Q4_K) X(Q5_K) X(Q6_K) X(IQ4_NL) X(IQ4_XS) X(MXFP4) X(NVFP4) X(IQ1_S) X(IQ1_M) \
  X(IQ2_XXS) X(IQ2_XS) X(IQ2_S) X(IQ3_XXS) X(IQ3_S) X(TQ1_0) X(TQ2_0)
