// Starts from GRUB in 32-bit mode, maps the first gigabyte, enables 64-bit mode and all vector and tile registers, and
// calls bare_main.
.section .multiboot, "a"
.align 4
.long 0x1BADB002, 0x3, -(0x1BADB002 + 0x3)

.section .text.boot, "ax"
.code32
.globl _start
_start:
  cli
  movl $stack_top, %esp
  movl $directories, %eax
  orl $3, %eax
  movl %eax, tables
  movl $pages, %eax
  orl $3, %eax
  movl %eax, directories
  xorl %ecx, %ecx
next_page:  // of 2 MB
  movl %ecx, %eax
  shll $21, %eax
  orl $0x83, %eax
  movl %eax, pages(, %ecx, 8)
  incl %ecx
  cmpl $512, %ecx
  jne next_page
  movl $tables, %eax
  movl %eax, %cr3
  movl %cr4, %eax
  orl $((1 << 5) | (1 << 9) | (1 << 10) | (1 << 18)), %eax  // PAE, OSFXSR, OSXMMEXCPT, OSXSAVE
  movl %eax, %cr4
  movl $0xC0000080, %ecx  // EFER
  rdmsr
  orl $(1 << 8), %eax  // LME
  wrmsr
  movl %cr0, %eax
  andl $~4, %eax  // no emulation of the FPU
  orl $0x80000022, %eax  // PG, NE, MP
  movl %eax, %cr0
  lgdt descriptors
  ljmp $8, $long_mode

.code64
long_mode:
  movw $16, %ax
  movw %ax, %ds
  movw %ax, %es
  movw %ax, %ss
  xorl %ecx, %ecx
  xorl %edx, %edx
  movl $0x600e7, %eax  // x87, SSE, AVX, AVX-512, AMX
  xsetbv
  movabsq $stack_top, %rsp
  call bare_main
stop:
  hlt
  jmp stop

.section .data
.align 8
segments: .quad 0, 0x00af9a000000ffff, 0x00cf92000000ffff
descriptors: .word 23
  .long segments

.section .bss
.align 4096
tables: .skip 4096
directories: .skip 4096
pages: .skip 4096
stack: .skip 1048576
.align 64
stack_top:
