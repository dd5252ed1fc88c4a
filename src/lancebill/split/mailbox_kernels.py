"""The two kernels of a mailbox, in PTX, because they need loads and stores ordered at system scope.

Offsets are those of `lancebill_mailbox`, whose header says what its words mean: the request at 0, `asked` at 8, `done`
at 12, `late` at 16. One thread does the work; the others only fill with NaN what was not computed in time.
"""

PTX = """
.version 7.0
.target sm_80
.address_size 64

.global .align 4 .u32 numbers;  // of all requests of this GPU so far: counted here, because reading host memory is slow

.visible .entry ring(.param .u64 box, .param .u64 call)
{
  .reg .pred p;
  .reg .u32 number, thread;
  .reg .u64 at, asked, place;
  mov.u32 thread, %tid.x;
  setp.ne.u32 p, thread, 0;
  @p bra ends;
  ld.param.u64 at, [box];
  ld.param.u64 asked, [call];
  mov.u64 place, numbers;
again:
  atom.global.add.u32 number, [place], 1;
  add.u32 number, number, 1;
  setp.eq.u32 p, number, 0;
  @p bra again;
  st.relaxed.sys.global.u64 [at], asked;
  fence.acq_rel.sys;
  st.release.sys.global.u32 [at+8], number;
ends:
  ret;
}

.visible .entry wait(.param .u64 box, .param .u64 sums, .param .u64 count, .param .u64 limit)
{
  .reg .pred p;
  .reg .u32 asked, done, thread, nan;
  .reg .u64 at, start, now, most, number, end, place;
  ld.param.u64 at, [box];
  ld.param.u64 most, [limit];
  mov.u64 start, %globaltimer;
  ld.relaxed.sys.global.u32 asked, [at+8];
again:
  ld.acquire.sys.global.u32 done, [at+12];
  setp.eq.u32 p, done, asked;
  @p bra ends;
  nanosleep.u32 200;
  mov.u64 now, %globaltimer;
  sub.u64 now, now, start;
  setp.lt.u64 p, now, most;
  @p bra again;
  st.relaxed.sys.global.u32 [at+16], asked;
  mov.u32 thread, %tid.x;
  mov.u32 nan, 0x7fffffff;
  ld.param.u64 end, [count];
  ld.param.u64 place, [sums];
  cvt.u64.u32 number, thread;
  shl.b64 now, number, 2;
  add.u64 place, place, now;
fill:
  setp.ge.u64 p, number, end;
  @p bra ends;
  st.global.u32 [place], nan;
  add.u64 number, number, 32;
  add.u64 place, place, 128;
  bra fill;
ends:
  ret;
}
"""
