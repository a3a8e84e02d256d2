"""Two optimizers in turn, as of a GAN: three steps of the critic, one of the generator."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
generator, critic = nn.Linear(8, 16).to(device), nn.Linear(16, 1).to(device)
critic_optimizer = torch.optim.RMSprop(critic.parameters(), lr=1e-4)
generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-4)
for _ in range(1_000_000):
    for _ in range(3):
        critic_optimizer.zero_grad()
        fake = generator(torch.randn(4, 8, device=device)).detach()
        (critic(fake) - critic(torch.randn(4, 16, device=device))).mean().backward()
        critic_optimizer.step()
    generator_optimizer.zero_grad()
    (-critic(generator(torch.randn(4, 8, device=device)))).mean().backward()
    generator_optimizer.step()
